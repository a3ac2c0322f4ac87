"""Saved states: what a trainer or critic is after a step, on disk, and back in memory bit for bit.

    stage (copy, the service waits)  ->  write in the background  ->  checksums  ->  rename      role.py, saver.py
    verify checksums  ->  read into the tensors that are there                                   role.py, reader.py

One directory a role, ``<step's directory>/<role>``, in the format of ``torch.distributed.checkpoint``: tensors by the
names of parameters, so that another number of ranks can load it. It appears under its name when it is whole:

    *.distcp, .metadata     tensors: ``parameter.<name>``, ``master.<name>`` (float32 masters of parameters that are
                            not float32), AdamW's ``exp_avg.<name>``, ``exp_avg_sq.<name>`` and ``step.<name>``, and
                            torch's random numbers, ``rng.cpu`` and on a GPU ``rng.cuda``
    counters.json           whole numbers: ``step``, ``skipped_in_row``
    checksums.json          size and digest of every other file, and a digest of its own

A LoRA policy's state holds its adapter and the adapter's moments alone: the base never changes, and is read from
``model.path`` again.
"""
