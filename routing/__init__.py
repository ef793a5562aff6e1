"""Pure decisions: which peers make a chain, which layers a peer should claim.

Standard library only; no clock, no I/O, no torch; randomness is passed in. What goes in and
comes out are the frozen values of `routing.spans`.
"""
