// The value codec: plain Python data to bytes and back (CODEC.md).
//
// It is in C for two reasons. Speed: a bridge call costs a few microseconds. And strictness: subclasses of the built-in
// types are read through the C API, so no method that a submission has overridden runs, and what arrives is plain.
// Neither direction may trap or leave a half-made object reachable, whatever it is given.

#include "guest.h"

#include <stdbool.h>
#include <string.h>

// ---- encoding

typedef struct {
    unsigned char *bytes;
    size_t length;
    size_t capacity;
    PyObject *fallback;  // called with an object that is not plain data
} Writer;

static bool write_value(Writer *w, PyObject *value, int depth);

static bool write_bytes(Writer *w, const void *bytes, size_t length) {
    if (length > CODEC_MAX_BYTES - w->length) {
        PyErr_SetString(PyExc_OverflowError, "value is too large to be sent");
        return false;
    }
    if (w->length + length > w->capacity) {
        size_t capacity = (w->length + length) * 2 + 256;
        unsigned char *grown = PyMem_RawRealloc(w->bytes, capacity);
        if (grown == NULL) {
            PyErr_NoMemory();
            return false;
        }
        w->bytes = grown;
        w->capacity = capacity;
    }
    memcpy(w->bytes + w->length, bytes, length);
    w->length += length;
    return true;
}

static bool write_tag(Writer *w, char tag) {
    return write_bytes(w, &tag, 1);
}

// Writes the tag and an unsigned LEB128 number.
static bool write_head(Writer *w, char tag, size_t number) {
    unsigned char head[1 + 5];
    size_t n = 0;
    head[n++] = (unsigned char)tag;
    while (number >= 0x80) {
        head[n++] = (unsigned char)(number | 0x80);
        number >>= 7;
    }
    head[n++] = (unsigned char)number;
    return write_bytes(w, head, n);
}

static bool write_blob(Writer *w, char tag, const char *bytes, Py_ssize_t length) {
    return write_head(w, tag, (size_t)length) && write_bytes(w, bytes, (size_t)length);
}

static bool write_int(Writer *w, PyObject *value) {
    const int flags = Py_ASNATIVEBYTES_LITTLE_ENDIAN;
    unsigned char small[64];
    unsigned char *digits = small;
    Py_ssize_t length = PyLong_AsNativeBytes(value, small, sizeof small, flags);
    if (length < 0) {
        return false;
    }
    if (length > (Py_ssize_t)sizeof small) {
        digits = PyMem_RawMalloc((size_t)length);
        if (digits == NULL) {
            PyErr_NoMemory();
            return false;
        }
        if (PyLong_AsNativeBytes(value, digits, length, flags) < 0) {
            PyMem_RawFree(digits);
            return false;
        }
    }
    // Drop the sign-extension bytes, so that every int has one encoding.
    while (length > 1) {
        unsigned char top = digits[length - 1];
        bool next_is_negative = (digits[length - 2] & 0x80) != 0;
        if (top != (next_is_negative ? 0xff : 0x00)) {
            break;
        }
        length--;
    }
    bool ok = write_blob(w, 'i', (const char *)digits, length);
    if (digits != small) {
        PyMem_RawFree(digits);
    }
    return ok;
}

static bool write_str(Writer *w, PyObject *value) {
    Py_ssize_t length;
    const char *utf8 = PyUnicode_AsUTF8AndSize(value, &length);
    if (utf8 != NULL) {
        return write_blob(w, 's', utf8, length);
    }
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        return false;
    }
    PyErr_Clear();  // a lone surrogate
    PyObject *encoded = PyUnicode_AsEncodedString(value, "utf-8", "surrogatepass");
    if (encoded == NULL) {
        return false;
    }
    bool ok = write_blob(w, 's', PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded));
    Py_DECREF(encoded);
    return ok;
}

static bool changed_while_encoded(void) {
    PyErr_SetString(PyExc_ValueError, "value changed while it was being sent");
    return false;
}

// Members are held while they are written: the fallback runs Python code, which may change the container.
static bool write_list(Writer *w, PyObject *value, int depth) {
    Py_ssize_t count = PyList_GET_SIZE(value);
    bool ok = write_head(w, 'l', (size_t)count);
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        if (PyList_GET_SIZE(value) != count) {
            return changed_while_encoded();
        }
        PyObject *member = Py_NewRef(PyList_GET_ITEM(value, i));
        ok = write_value(w, member, depth + 1);
        Py_DECREF(member);
    }
    return ok;
}

static bool write_tuple(Writer *w, PyObject *value, int depth) {
    Py_ssize_t count = PyTuple_GET_SIZE(value);
    bool ok = write_head(w, 't', (size_t)count);
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        ok = write_value(w, PyTuple_GET_ITEM(value, i), depth + 1);
    }
    return ok;
}

static bool write_dict(Writer *w, PyObject *value, int depth) {
    Py_ssize_t count = PyDict_GET_SIZE(value);
    Py_ssize_t position = 0;
    Py_ssize_t written = 0;
    PyObject *key;
    PyObject *member;
    bool ok = write_head(w, 'd', (size_t)count);
    while (ok && PyDict_Next(value, &position, &key, &member)) {
        if (written++ == count) {
            return changed_while_encoded();
        }
        Py_INCREF(key);
        Py_INCREF(member);
        ok = write_value(w, key, depth + 1) && write_value(w, member, depth + 1);
        Py_DECREF(key);
        Py_DECREF(member);
    }
    if (ok && written != count) {
        return changed_while_encoded();
    }
    return ok;
}

static bool write_set(Writer *w, PyObject *value, int depth) {
    Py_ssize_t count = PySet_GET_SIZE(value);
    Py_ssize_t written = 0;
    bool ok = write_head(w, PyFrozenSet_Check(value) ? 'z' : 'S', (size_t)count);
    PyObject *iterator = ok ? PySet_Type.tp_iter(value) : NULL;  // the built-in one, even for a subclass
    if (iterator == NULL) {
        return false;
    }
    PyObject *member;
    while (ok && (member = PyIter_Next(iterator)) != NULL) {
        ok = write_value(w, member, depth + 1);
        Py_DECREF(member);
        written++;
    }
    Py_DECREF(iterator);
    if (ok && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();  // what the iterator says of a set that has changed
        return changed_while_encoded();
    }
    if (!ok || PyErr_Occurred()) {
        return false;
    }
    return written == count ? true : changed_while_encoded();
}

// The type's own name, cut to what the format allows. Read from the type structure: `type(o).__name__` could run code
// of a metaclass.
static bool write_type_name(Writer *w, PyObject *value) {
    const char *name = Py_TYPE(value)->tp_name;
    const char *dot = strrchr(name, '.');
    if (dot != NULL) {
        name = dot + 1;
    }
    size_t length = strlen(name);
    if (length > 100) {
        length = 100;
        while (length > 0 && ((unsigned char)name[length] & 0xc0) == 0x80) {
            length--;  // not in the middle of a character
        }
    }
    return write_blob(w, 's', name, (Py_ssize_t)length);
}

// The fallback answers with an int, the id of a handle, or with (type name, payload) for a by-value type.
static bool write_other(Writer *w, PyObject *value, int depth) {
    PyObject *answer = PyObject_CallOneArg(w->fallback, value);
    if (answer == NULL) {
        return false;
    }
    bool ok = false;
    if (PyTuple_CheckExact(answer) && PyTuple_GET_SIZE(answer) == 2) {
        ok = write_tag(w, 'v') && write_value(w, PyTuple_GET_ITEM(answer, 0), depth + 1) &&
             write_value(w, PyTuple_GET_ITEM(answer, 1), depth + 1);
    } else {
        unsigned long id = PyLong_AsUnsignedLong(answer);
        if (!PyErr_Occurred()) {
            ok = write_head(w, 'h', id) && write_type_name(w, value);
        }
    }
    Py_DECREF(answer);
    return ok;
}

static bool write_value(Writer *w, PyObject *value, int depth) {
    if (depth > CODEC_MAX_DEPTH) {
        PyErr_SetString(PyExc_ValueError, "value is nested too deeply, or cyclic");
        return false;
    }
    if (value == Py_None) {
        return write_tag(w, 'N');
    }
    if (value == Py_True || value == Py_False) {
        return write_tag(w, value == Py_True ? 'T' : 'F');
    }
    if (PyLong_Check(value)) {
        return write_int(w, value);
    }
    if (PyFloat_Check(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        return write_tag(w, 'f') && write_bytes(w, &number, sizeof number);
    }
    if (PyUnicode_Check(value)) {
        return write_str(w, value);
    }
    if (PyBytes_Check(value)) {
        return write_blob(w, 'b', PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
    }
    if (PyByteArray_Check(value)) {
        return write_blob(w, 'B', PyByteArray_AS_STRING(value), PyByteArray_GET_SIZE(value));
    }
    if (PyList_Check(value)) {
        return write_list(w, value, depth);
    }
    if (PyTuple_Check(value)) {
        return write_tuple(w, value, depth);
    }
    if (PyDict_Check(value)) {
        return write_dict(w, value, depth);
    }
    if (PyAnySet_Check(value)) {
        return write_set(w, value, depth);
    }
    if (PyComplex_Check(value)) {
        Py_complex number = ((PyComplexObject *)value)->cval;
        return write_tag(w, 'c') && write_bytes(w, &number.real, 8) && write_bytes(w, &number.imag, 8);
    }
    return write_other(w, value, depth);
}

PyObject *codec_encode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "encode(value, fallback)");
        return NULL;
    }
    Writer w = {.fallback = args[1]};
    PyObject *result = NULL;
    if (write_value(&w, args[0], 0)) {
        result = PyBytes_FromStringAndSize((const char *)w.bytes, (Py_ssize_t)w.length);
    }
    PyMem_RawFree(w.bytes);
    return result;
}

// ---- decoding

typedef struct {
    const unsigned char *next;
    const unsigned char *end;
    PyObject *by_value;  // called with (type name, payload), or None: no such value is accepted
    PyObject *handle;    // called with (id, type name), or None
} Reader;

static PyObject *read_value(Reader *r, int depth);

static PyObject *malformed(void) {
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "malformed data");
    }
    return NULL;
}

static size_t bytes_left(const Reader *r) {
    return (size_t)(r->end - r->next);
}

// Reads an unsigned LEB128 number of at most 5 bytes and 32 bits.
static bool read_number(Reader *r, uint32_t *number) {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (r->next == r->end) {
            return false;
        }
        unsigned char byte = *r->next++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0) {
            *number = (uint32_t)value;
            return value <= UINT32_MAX;
        }
    }
    return false;
}

static PyObject *read_float(Reader *r) {
    double number;
    if (bytes_left(r) < sizeof number) {
        return malformed();
    }
    memcpy(&number, r->next, sizeof number);
    r->next += sizeof number;
    return PyFloat_FromDouble(number);
}

static PyObject *read_complex(Reader *r) {
    Py_complex number;
    if (bytes_left(r) < 16) {
        return malformed();
    }
    memcpy(&number.real, r->next, 8);
    memcpy(&number.imag, r->next + 8, 8);
    r->next += 16;
    return PyComplex_FromCComplex(number);
}

static PyObject *read_sequence(Reader *r, Py_ssize_t count, bool is_list, int depth) {
    PyObject *sequence = is_list ? PyList_New(count) : PyTuple_New(count);
    for (Py_ssize_t i = 0; sequence != NULL && i < count; i++) {
        PyObject *member = read_value(r, depth + 1);
        if (member == NULL) {
            Py_CLEAR(sequence);
        } else if (is_list) {
            PyList_SET_ITEM(sequence, i, member);
        } else {
            PyTuple_SET_ITEM(sequence, i, member);
        }
    }
    return sequence;
}

static PyObject *read_dict(Reader *r, Py_ssize_t count, int depth) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < count; i++) {
        PyObject *key = read_value(r, depth + 1);
        PyObject *member = key == NULL ? NULL : read_value(r, depth + 1);
        if (member == NULL || PyDict_SetItem(dict, key, member) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(key);
        Py_XDECREF(member);
    }
    return dict;
}

static PyObject *read_set(Reader *r, Py_ssize_t count, bool is_frozen, int depth) {
    PyObject *set = is_frozen ? PyFrozenSet_New(NULL) : PySet_New(NULL);
    for (Py_ssize_t i = 0; set != NULL && i < count; i++) {
        PyObject *member = read_value(r, depth + 1);
        if (member == NULL || PySet_Add(set, member) < 0) {
            Py_CLEAR(set);
        }
        Py_XDECREF(member);
    }
    return set;
}

static PyObject *read_by_value(Reader *r, int depth) {
    if (r->by_value == Py_None) {
        return malformed();
    }
    PyObject *name = read_value(r, depth + 1);
    PyObject *payload = name == NULL ? NULL : read_value(r, depth + 1);
    PyObject *value = NULL;
    if (payload != NULL) {
        value = PyUnicode_CheckExact(name) ? PyObject_CallFunctionObjArgs(r->by_value, name, payload, NULL) : malformed();
    }
    Py_XDECREF(name);
    Py_XDECREF(payload);
    return value;
}

static PyObject *read_handle(Reader *r, uint32_t id, int depth) {
    if (r->handle == Py_None) {
        return malformed();
    }
    PyObject *name = read_value(r, depth + 1);
    if (name == NULL) {
        return NULL;
    }
    PyObject *value = NULL;
    if (PyUnicode_CheckExact(name) && PyUnicode_GET_LENGTH(name) <= 100) {
        value = PyObject_CallFunction(r->handle, "kO", (unsigned long)id, name);
    } else {
        malformed();
    }
    Py_DECREF(name);
    return value;
}

static PyObject *read_value(Reader *r, int depth) {
    if (depth > CODEC_MAX_DEPTH || r->next == r->end) {
        return malformed();
    }
    char tag = (char)*r->next++;
    switch (tag) {
    case 'N':
        Py_RETURN_NONE;
    case 'T':
        Py_RETURN_TRUE;
    case 'F':
        Py_RETURN_FALSE;
    case 'f':
        return read_float(r);
    case 'c':
        return read_complex(r);
    case 'v':
        return read_by_value(r, depth);
    }

    uint32_t number;
    if (!read_number(r, &number)) {
        return malformed();
    }
    if (tag == 'h') {
        return read_handle(r, number, depth);
    }
    // Every member takes at least one byte, so no length can ask for more memory than the message itself has.
    if (number > bytes_left(r)) {
        return malformed();
    }
    const char *content = (const char *)r->next;
    Py_ssize_t count = (Py_ssize_t)number;
    switch (tag) {
    case 'i':
        r->next += count;
        return count == 0 ? malformed() : PyLong_FromNativeBytes(content, number, Py_ASNATIVEBYTES_LITTLE_ENDIAN);
    case 's':
        r->next += count;
        return PyUnicode_DecodeUTF8(content, count, "surrogatepass");
    case 'b':
        r->next += count;
        return PyBytes_FromStringAndSize(content, count);
    case 'B':
        r->next += count;
        return PyByteArray_FromStringAndSize(content, count);
    case 'l':
        return read_sequence(r, count, true, depth);
    case 't':
        return read_sequence(r, count, false, depth);
    case 'd':
        return read_dict(r, count, depth);
    case 'S':
        return read_set(r, count, false, depth);
    case 'z':
        return read_set(r, count, true, depth);
    }
    return malformed();
}

PyObject *codec_decode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "decode(bytes, by_value, handle)");
        return NULL;
    }
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    size_t length = (size_t)PyBytes_GET_SIZE(args[0]);
    if (length > CODEC_MAX_BYTES) {
        return malformed();
    }
    Reader r = {.next = bytes, .end = bytes + length, .by_value = args[1], .handle = args[2]};
    PyObject *value = read_value(&r, 0);
    if (value != NULL && r.next != r.end) {
        Py_CLEAR(value);
        return malformed();
    }
    // A list as a dict's key is malformed data like any other.
    if (value == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        return malformed();
    }
    return value;
}
