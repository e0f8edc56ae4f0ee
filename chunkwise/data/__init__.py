"""What models are trained on here: text files, and synthetic tasks.

A task has `train` (a Dataset whose item i is a pure function of the seed and i, so a resumed run sees the very batches an
uninterrupted one does), `evaluate(model)` (a dict of plain numbers) and `headline` (the key of the number to watch).
"""
