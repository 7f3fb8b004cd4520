"""The stages that LocalIterator chains.

`source.py` items of an iterable · `function_stage.py` base of the stages that apply a function ·
`unary.py` stages with one parent · `buffering.py` batch and shuffle · `tasks.py` for_each with Ray
tasks · `branches.py` union and duplicate.
"""
