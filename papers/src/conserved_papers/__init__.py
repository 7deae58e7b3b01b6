"""Five documents on conservation laws: their claims as checks, their experiments and figures, and their blocks.

`conserved_papers.claims` judges statements, `conserved_papers.lab` repeats experiments, and `conserved_papers.blocks`
holds the architectures as plain modules. The commands `conserved claims` and `conserved reproduce` use this package.
"""
