"""The n-gram index: counts of short token sequences, built once, mapped by every process, looked up in batches.

    index.py      NgramIndex: the file format, opened as memory maps; check.py reads it whole, describe.py sums it up
    lookup.py     look_up: P(token | context) for many contexts and candidates at once (numba)
    sources.py    the index that a method's option names
    build.py      an index from documents of token ids, in bounded memory, by runs.py, nodes.py and write.py
    documents.py  documents from text and token files; tokens.py is their tokenizer
    trie.py       the published `.trie` format, converted in bounded memory

Nothing is imported here: the look-up needs numba, opening and describing an index does not.
"""
