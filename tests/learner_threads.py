"""The learner thread of a plan, and the batches that it holds."""

from flowrl.iter.stage import walk


def learner_of(algorithm):
    """Return the LearnerThread of an algorithm's plan."""
    found = (getattr(stage, "learner_thread", None) for stage in walk(algorithm.plan.stage))
    return next(learner for learner in found if learner is not None)


def held_batches(learner):
    """Return the batches that wait, are in use, or were learned from but are not dequeued."""
    state = learner.state_dict()
    in_use = [batch for batch, _ in state["minibatches"]["batches"]]
    return [*state["waiting"], *in_use, *(result["batch"] for result in state["learned"])]
