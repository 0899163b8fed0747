"""The embedded models: a tiny target and its drafters, in the published layouts.

Data only, made by `sparkbench train embedded`. `sparkbench.catalog` knows the folders; the model card is
`README.md` beside this file.
"""
