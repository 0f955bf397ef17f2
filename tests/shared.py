"""Values that tests of a module share: made once for all workers of a run, and only those that selected tests need."""

import fcntl
import os
import pickle


def once(tmp_path_factory, name, make):
    """Returns what `make` returns; of a run's workers the first to come makes it, and the others wait and read it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
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
