"""Moving weights along a kind of group of one's own, the quaternions of `custom_kind.py`.

The optional methods of a kind invert and multiply its elements, scale units and choose one point of an orbit. Weights
are then moved, balanced, aligned and given fingerprints along it as along any other.
"""

import torch

from conserved import transform
from custom_kind import law, laws, model, scores

before, mark = scores(), transform.fingerprint(model, laws=laws)
done = transform.equalize(model, laws=laws)
assert torch.allclose(scores(), before)
assert transform.fingerprint(model, laws=laws).difference(mark) < 1e-9
print(f"balanced: {done.before[law.name]:.1e} → {done.after[law.name]:.1e}, with the same scores and fingerprint")
