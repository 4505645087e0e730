"""Forecasts of what calls will take: made, learnt, revised, recorded, kept.

lengths       : forecasts of answers and prompts, and what is learnt from the real lengths
sample        : pure: which answers teach, so that learning takes a bounded share of the time
revisions     : pure: which forecasts are revised while requests wait, and when
loops         : learning and revising on the event loop, in slices
reading       : prompts whose words are read in another process than the one that forecasts
record        : the length record, training data for a predictor
learned_state : pure: everything that a server has learnt, as one state, and the way back
learned_parts : pure: the parts of the scheduler and of the engines' clients in that state
part          : the predictors of answer lengths, and the folder that keeps what a server has learned
call_forecast : what a call will take, as it is told to whoever asks
state_file    : the file of that state, `DIR/learnt` of `--state DIR`
saver         : saves the state every minute, and at the end
"""
