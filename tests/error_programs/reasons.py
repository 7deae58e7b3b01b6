"""Why a tool that looks at weights, gradients, updates, replicas and modes cannot see an error."""

from __future__ import annotations

REASONS: dict[str, tuple[str, ...]] = {
    "The loss is another function than was meant, and its gradient is that of this function.": (
        "kl_div is given probabilities instead of their logarithms",
        "logits are viewed instead of transposed for the loss",
        "gaussian_nll_loss is given the logarithm of the variance",
        "a student is distilled from its own logits",
        "the divergence of a variational autoencoder has the wrong sign",
        "the balance loss of experts multiplies shares by the mean chosen score",
        "the weight of ignored tokens is in the mean of the loss",
        "one of two losses is not scaled",
        "means over micro-batches of unequal numbers of tokens are averaged",
        "the reference of a preference loss is the trained model itself",
        "the reference model of a preference loss is the policy itself",
        "the target network is the network itself",
        "noise is added to the clean target in place",
    ),
    "A number that is added to a loss leaves no trace in its gradient.": (
        "the tensor that carries the balance loss is thrown away",
        "the balance loss of a router is added by its value",
        "a penalty of weights is that of a copy of the model",
    ),
    "Labels and inputs are data: every weight, gradient and update is that of these data.": (
        "soft labels do not sum to one",
        "targets between 0 and 1 are cut to integers",
        "the labels of a cosine loss are 0 and 1 where it wants -1 and 1",
        "a real class is the one that the loss ignores",
        "labels are mixed with another permutation than inputs",
        "the noise of an example is the same in every step",
    ),
    "The model is another function than was meant, and it is differentiated rightly.": (
        "a forward hook of an evaluation stays and zeroes a layer",
        "a recurrent model gets its sequence time first",
        "features are normalised over the batch",
        "a padding mask is broadcast over queries instead of keys",
        "the padding token has number 0, and `0 or end` looks for another",
        "documents packed into one row attend to each other",
        "scores of attention are divided by the root of the width twice",
        "the vector of the padding token is drawn at random after it was set to zero",
        "the teacher of a distillation is in train mode",
        "a functional dropout does not know of eval mode",
        "a bias is added to a buffer that the step count multiplies away",
        "only the first row of a position table is used",
        "a callback moves a buffer of the model",
    ),
    "The gradient stops at a `detach()` or `no_grad()` in the model's own code, as truncated gradients do.": (
        "a recurrent state is detached at every position",
        "the mean square of a norm is computed under no_grad",
        "embeddings are divided by the length of their data",
    ),
    "No identity spans this derivative: `conserved.check` of the function refutes it, and `check_scale` may.": (
        "the backward of an activation forgets a term",
        "a backward saves the output where it needs the input",
        "the gradient of a smooth maximum is that of the hard one",
    ),
    "A factor of all gradients leaves every identity as it is; `check_scale` sees it where it is called.": (
        "gradients are divided by the number of processes twice",
        "unscale_() divides gradients of a loss that was not scaled",
        "gradients are divided by the loss scale of the next step",
        "hand-written clipping also scales small gradients up",
        "clipping divides by the square of the norm",
        "a clipping norm counts tensors that all ranks have once for each rank",
        "features of other ranks are gathered without a gradient",
    ),
    "Gradients that a program scales, clips, reverses or perturbs tensor by tensor are a method.": (
        "a report normalises a gradient in place",
        "a gradient is divided by its norm where it should be by the number of tokens",
        "only the first parameter group is clipped",
        "gradients are clipped in training_step, before backward() has made them",
        "noise is added to gradients that are still scaled",
        "gradients that were turned for an adversary are stepped by the model's optimizer",
        "a bit of a gradient flips",
    ),
    "Which passes belong to a step is a choice: accumulated, discarded and delayed gradients are methods.": (
        "weights are swapped for their average between forward and backward",
        "a batch whose loss is too high is skipped and its gradient stays",
        "the first of two losses is cleared before the second's backward",
        "the loss of the last step is differentiated, not that of this one",
        "the pass of an evaluation is used for the gradient",
        "the loss of the actor leaves its gradient in the critic, which is stepped afterwards",
        "a finder of learning rates leaves the weights that it has trained",
        "a step fused into the backward runs in every micro-batch",
    ),
    "A rate, a schedule, a momentum or a decay is a choice.": (
        "decay and rest of a moving average are swapped",
        "the count of an average is set back in every step, so that it is a copy",
        "an average is updated after every micro-batch",
        "the average is made before the pretrained weights are loaded",
        "an average is updated with weights of before the step only once",
        "a plateau scheduler of a loss waits for it to grow",
        "the rate of a thawed group is an integer division",
        "a warm restart leaves the rate of one group behind",
        "the first rate is the tensor that the schedule writes to",
        "batch norms get the momentum of another framework",
    ),
    "A copy of the model that nobody writes to is a frozen teacher, or no part of the step at all.": (
        "the pairs of a momentum encoder are a used-up iterator",
        "slow weights of a lookahead stay at their first values",
    ),
    "An optimizer with a step of its own has no rule to be held against.": (
        "a custom SGD divides its momentum by one minus the decay",
        "a subclass of Adam forgets the correction of the bias",
        "weight decay of Lion goes through the sign",
        "weight decay is computed and its result is not used",
    ),
    "Processes that average weights in every step, or hold other parts of a model, need no common gradient.": (
        "the wrapper reduces over a group of one process",
        "weights are broadcast in every step and gradients are not reduced",
    ),
    "What differs by rank from the first step on, as experts do, is not known to be a replica.": (
        "experts that differ by rank are averaged over ranks",
        "all ranks have one seed, and so the same batches",
        "a norm before split layers has the gradient of one half",
    ),
    "State in plain attributes of a program is out of sight.": (
        "running means of features are plain attributes and a resume has not got them",
    ),
    "The wrapper hands the buffers of rank 0 to all ranks before the next pass, where they agree again.": (
        "rank 0 evaluates in train mode and moves its statistics",
    ),
}
"""By reason, the errors that a default monitor does not see for it."""


def reason_for(name: str) -> str:
    """Return why an error is not seen; empty if no reason is known."""
    return next((reason for reason, names in REASONS.items() if name in names), "")
