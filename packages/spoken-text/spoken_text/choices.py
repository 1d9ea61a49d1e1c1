"""What options may be."""

NORMALIZE = ("off", "auto")  # the values of `normalize`
LONGEST_PAUSE_S = 10.0
