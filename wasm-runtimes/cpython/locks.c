// Waiting for a lock, where there is one thread: nobody else can ever release it.
//
// CPython's own wait would spin. Without a time limit it now fails as the deadlock it is; with one, it sleeps for that long
// on the guest's clock, which takes no time.

#include "guest.h"

#include <time.h>

// As CPython's, of which only this one function is replaced (the linker's `--wrap`). PY_LOCK_INTR stands for "an exception
// is set"; a caller that cannot have one gives no flag for it, and only ever tries.
PyLockStatus __real__PyMutex_LockTimed(PyMutex *mutex, PyTime_t timeout, int flags);

PyLockStatus __wrap__PyMutex_LockTimed(PyMutex *mutex, PyTime_t timeout, int flags) {
    const int handles_signals = 2;
    if (timeout == 0 || !(flags & handles_signals)) {
        return __real__PyMutex_LockTimed(mutex, timeout, flags);
    }
    PyLockStatus status = __real__PyMutex_LockTimed(mutex, 0, flags);
    if (status == PY_LOCK_ACQUIRED) {
        return status;
    }
    if (timeout < 0) {
        PyErr_SetString(PyExc_RuntimeError, "deadlock: waiting for ever, as the sandbox has no other threads");
        return PY_LOCK_INTR;
    }
    const PyTime_t second = 1000000000;
    struct timespec time = {.tv_sec = (time_t)(timeout / second), .tv_nsec = (long)(timeout % second)};
    nanosleep(&time, NULL);
    return PY_LOCK_FAILURE;
}
