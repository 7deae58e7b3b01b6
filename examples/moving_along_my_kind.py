"""Moving weights along a kind of group of one's own, the quaternions of `custom_kind.py`.

A kind registers how its elements are multiplied and undone, which of them are scales and which phase to prefer. Weights
are then moved, balanced, aligned and given fingerprints along it as along any other.
"""

import torch
from torch import Tensor

from conserved import Kind, Symmetry, transform
from conserved.transform.elements import composed, inverse, scaling_element, settled
from custom_kind import ONE, QuaternionScaling, law, laws, model, scores, times


def conjugate(q: Tensor) -> Tensor:
    """The quaternions with their imaginary parts turned round."""
    return q * (2 * ONE - 1)


@settled.register(QuaternionScaling)
def phases(kind: Kind, law: Symmetry, weights: dict[str, Tensor]) -> Tensor:
    """Unit quaternions that make the sums of c|c|² over the columns of the first leg real and positive."""
    rows = law.matrices(weights)[0].unflatten(0, (-1, 4))
    return torch.nn.functional.normalize(conjugate((rows * rows.square().sum(1, keepdim=True)).sum(-1)), dim=1)


inverse.register(QuaternionScaling, lambda kind, c: conjugate(c) / c.square().sum(-1, keepdim=True))
composed.register(QuaternionScaling, lambda kind, later, earlier: times(later[..., None], earlier[..., None])[..., 0])
scaling_element.register(QuaternionScaling, lambda kind, factors: factors[:, None] * ONE)

before, mark = scores(), transform.fingerprint(model, laws=laws)
done = transform.equalize(model, laws=laws)
assert torch.allclose(scores(), before)
assert transform.fingerprint(model, laws=laws).difference(mark) < 1e-9
print(f"balanced: {done.before[law.name]:.1e} → {done.after[law.name]:.1e}, with the same scores and fingerprint")
