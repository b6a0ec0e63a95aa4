// The compiled standard library, linked in as read-only data (made by pack_stdlib.py with this very Python version).
//
// There is no file system in the guest, not even while the snapshot is made. A handful of modules must exist before the
// finder in stage0.py does; they are given to CPython as frozen modules. All others stay marshalled in one blob and are
// unmarshalled on import.

#include "guest.h"

static const unsigned char index_bytes[] = {
#embed "stdlib.index"
};

static const unsigned char code_bytes[] = {
#embed "stdlib.code"
};

static const unsigned char encodings_code[] = {
#embed "early.encodings"
};

static const unsigned char encodings_aliases_code[] = {
#embed "early.encodings.aliases"
};

static const unsigned char encodings_utf_8_code[] = {
#embed "early.encodings.utf_8"
};

static const unsigned char stage0_code[] = {
#embed "early._wardian_stage0"
};

static const struct _frozen early_modules[] = {
    {"encodings", encodings_code, sizeof encodings_code, 1},
    {"encodings.aliases", encodings_aliases_code, sizeof encodings_aliases_code, 0},
    {"encodings.utf_8", encodings_utf_8_code, sizeof encodings_utf_8_code, 0},
    {"_wardian_stage0", stage0_code, sizeof stage0_code, 0},
    {NULL, NULL, 0, 0},
};

void stdlib_register_early_modules(void) {
    PyImport_FrozenModules = early_modules;
}

static PyObject *view(const unsigned char *bytes, size_t length) {
    return PyMemoryView_FromMemory((char *)bytes, (Py_ssize_t)length, PyBUF_READ);
}

PyObject *stdlib_index(void) {
    return view(index_bytes, sizeof index_bytes);
}

PyObject *stdlib_code(void) {
    return view(code_bytes, sizeof code_bytes);
}
