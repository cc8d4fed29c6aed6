"""Layers whose past is a state: the recurrences over forests of rows, and the storage of committed states.

Shapes, in all modules of this folder:
    rows      new tokens of a forward, all sequences end to end
    s, n      groups of s pieces of n rows each, padded
    heads     heads of a layer's state
    dk, dv    a head's state is [dk, dv]: keys write values into it, queries read them
"""
