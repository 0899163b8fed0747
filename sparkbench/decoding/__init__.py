"""One decode loop for every method: propose, verify, accept, commit.

`tree` is what a method proposes, `target` verifies it, `accept` decides what is kept, `cache` keeps it, `loop` ties
them together and `timing` says where the time went. Nothing here knows a method, a file format or the command line.
"""
