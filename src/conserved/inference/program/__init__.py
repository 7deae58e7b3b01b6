"""One call of a model as a program: a list of operations on numbered values, recorded while the model runs.

`capture.py` runs the call, `recorder.py` records it, and `captured_program.py` is the result. The other files find what
no operation shows, such as hidden inputs and numbers that Python reads, and leave the model as it was.
"""
