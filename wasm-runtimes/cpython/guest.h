// What the guest's C files share. See shim.c for the exports, CODEC.md for the wire format.
#ifndef WARDIAN_GUEST_H
#define WARDIAN_GUEST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Largest message of the codec, and deepest nesting (CODEC.md, section 1.1).
#define CODEC_MAX_BYTES ((size_t)16 << 20)
#define CODEC_MAX_DEPTH 200

// codec.c: functions of the module `_wardian_guest`; each says there what it takes and returns.
PyObject *codec_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *codec_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *codec_snapshot(PyObject *module, PyObject *objects);
PyObject *codec_changes(PyObject *module, PyObject *snapshot);

// stdlib.c: the compiled standard library.
void stdlib_register_early_modules(void);
PyObject *stdlib_index(void);
PyObject *stdlib_code(void);

// snapshot.c: shaping the heap before the snapshot is taken.
int snapshot_make_immortal(void);
void snapshot_fill_heap(void);
void snapshot_set_arena_allocator(void);

#endif
