"""`make faults`: random faults in small jobs of several rank processes, one fault a job, and what came of each.

Time limits are shorter than a user's: of process groups 8 seconds; of `megatron-cp train`, in its first step and while
it saves, 40 seconds in place of ten minutes. A skipped layer or backward is drawn where it has messages: nobody can
miss what is not sent.

    cases.py      what is drawn: a job and its fault, by a seed and a number alone
    job.py        one rank of a job: a small training loop, with the fault in it
    faulty.py     the fault itself: when it is due, and what it does
    launches.py   the ways in which a job's ranks are started
    watch.py      one job from outside: signals, time limits, processes that are left, its checkpoint
    classify.py   what came of it, from what was recorded

Needs Linux: it forks, and it finds processes that are left behind by `PR_SET_CHILD_SUBREAPER`.
"""
