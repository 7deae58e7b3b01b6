"""What speaks of the five documents: their claims, their experiments run again, and the blocks they are about.

`conserved.claims`, `conserved.lab` and `conserved.blocks` are short for what is in here. Nothing else in the library
imports it: it is loaded when it is asked for.
"""
