"""From solved equations to symmetries: `assembly.py` finds groups and legs, and `naming.py` names them.

The other files each find one sort of symmetry, or write one down so that people recognise it.
"""
