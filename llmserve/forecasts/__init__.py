"""Forecasts of answers' lengths: made, learnt, revised, recorded, kept.

learned_state   : everything that a server has learnt
learning        : learns from the lengths of answers, between other work, in a bounded share of the event loop
lengths         : predicted lengths of answers, and what the predictor learns from the real lengths
part            : the predictors of answer lengths, and the folder that keeps what a server has learned
record          : the length record
revising        : revises forecasts on the event loop while answers and arrivals go on
revisions       : which forecasts are revised while requests wait, and when
saving          : saves what a server has learnt
scheduler_state : what the scheduler and the engines' clients have learnt, as states; and the way back
state_file      : the file in which a server keeps what it has learnt, `DIR/learnt` of `--state DIR`
"""
