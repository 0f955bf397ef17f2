"""Values that tests of a module share: made once for all workers of a run, and only those that selected tests need."""

import fcntl
import functools
import pickle
import threading
from weakref import WeakValueDictionary

from megatron_cp.data.corpus import read_corpus
from megatron_cp.data.tokenizer import ByteTokenizer
from megatron_cp.testing.case import LayerCase


def once(tmp_path_factory, name, make):
    """Returns what `make` returns; of a run's workers the first to come makes it, and the others wait and read it."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # a worker's; the environment would say so to a pytest that a worker runs too
        folder = folder.parent
    made = folder / f"{name}.pickle"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_bytes(pickle.dumps(make()))
    return pickle.loads(made.read_bytes())


def selected(request, test):
    """Returns the parameters of this module's cases of a test that are selected to run, in this worker or another."""
    items = [item for item in request.session.items if item.module is request.module]
    return [item.callspec.params for item in items if item.originalname == test.__name__]


def plan_once(plan=LayerCase.plan):
    """Returns `LayerCase.plan` for ranks that are threads: those that run a case at the same time share its plan.

    Ranks that are processes still plan by themselves. No plan outlives those who hold it; a test that holds it shares
    it with all of its runs.
    """
    plans, lock = WeakValueDictionary(), threading.Lock()

    def shared(case):
        key = pickle.dumps(case)  # a hash is not to be had where the mask is a table
        with lock:
            found = plans.get(key)
            if found is None:
                found = plans[key] = plan(case)
            return found

    return shared


def read_once(read=read_corpus):
    """Returns `read_corpus` that reads the default corpus once a process; what it returns cannot be changed."""
    default = functools.cache(lambda: read(None, ByteTokenizer()))

    def shared(path, tokenizer):
        is_default = path is None and isinstance(tokenizer, ByteTokenizer)
        return default() if is_default else read(path, tokenizer)

    return shared
