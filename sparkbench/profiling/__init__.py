"""Profiling: what a forward costs against its width, its context and its batch.

`curve.py` holds the step curve and its file, `measure.py` times forwards, `shapes.py` makes targets of random weights,
`roofline.py` says what a forward must read and compute, `experts.py` counts experts, `profile.py` puts all together.
`costs.py` is what methods get that decide by costs.
Nothing is imported here, so that a reader of curves needs no torch.
"""
