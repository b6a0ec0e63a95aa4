// The value codec: plain Python data to bytes and back (CODEC.md).
//
// It is in C for two reasons. Speed: a bridge call costs a few microseconds. And strictness: subclasses of the built-in
// types are read through the C API, so no method that a submission has overridden runs, and what arrives is plain.
// Neither direction may trap or leave a half-made object reachable, whatever it is given.

#include "guest.h"

#include <stdbool.h>
#include <string.h>

// ---- numbered containers

// Containers are numbered within a message, in the order in which they begin, so that one that occurs twice is written
// once. What a container takes when it is written out, and how deep it is, is kept for the references to it: a message
// means no more than it could say without them.
typedef struct {
    PyObject *object;    // strong
    unsigned size : 24;  // 0 while the container is open
    unsigned height : 8;
} Entry;

typedef struct {
    Entry *entries;
    size_t count;
    size_t capacity;
    // Numbers by address, plus 1, in a table that has a power of two of places; made when it is worth it.
    uint32_t *table;
    size_t table_size;
} Numbering;

// Up to this many entries are searched one by one.
#define SEARCHED 8

static void numbering_clear(Numbering *n) {
    for (size_t i = 0; i < n->count; i++) {
        Py_XDECREF(n->entries[i].object);
    }
    PyMem_RawFree(n->entries);
    PyMem_RawFree(n->table);
}

static bool numbering_add(Numbering *n, PyObject *object) {
    if (n->count == n->capacity) {
        size_t capacity = n->capacity * 2 + 16;
        Entry *grown = PyMem_RawRealloc(n->entries, capacity * sizeof *grown);
        if (grown == NULL) {
            PyErr_NoMemory();
            return false;
        }
        n->entries = grown;
        n->capacity = capacity;
    }
    n->entries[n->count++] = (Entry){.object = Py_XNewRef(object)};
    return true;
}

static size_t place_of(const Numbering *n, const PyObject *object) {
    size_t place = ((uintptr_t)object >> 3) * 2654435761u & (n->table_size - 1);
    while (n->table[place] != 0 && n->entries[n->table[place] - 1].object != object) {
        place = (place + 1) & (n->table_size - 1);
    }
    return place;
}

// Brings the table up to date. Without memory for it, entries are searched one by one.
static void numbering_index(Numbering *n) {
    size_t first = n->count - 1;
    if (n->count * 2 > n->table_size) {
        size_t size = n->table_size == 0 ? 64 : n->table_size * 4;
        while (n->count * 2 > size) {
            size *= 2;
        }
        PyMem_RawFree(n->table);
        n->table = PyMem_RawCalloc(size, sizeof *n->table);
        n->table_size = n->table == NULL ? 0 : size;
        first = 0;
    }
    for (size_t i = first; n->table != NULL && i < n->count; i++) {
        n->table[place_of(n, n->entries[i].object)] = (uint32_t)i + 1;
    }
}

// Returns the number of an object that has one, or -1.
static long numbering_find(const Numbering *n, const PyObject *object) {
    if (n->table != NULL) {
        return (long)n->table[place_of(n, object)] - 1;
    }
    for (size_t i = 0; i < n->count; i++) {
        if (n->entries[i].object == object) {
            return (long)i;
        }
    }
    return -1;
}

static PyObject *numbering_list(const Numbering *n) {
    PyObject *list = PyList_New((Py_ssize_t)n->count);
    for (size_t i = 0; list != NULL && i < n->count; i++) {
        PyList_SET_ITEM(list, (Py_ssize_t)i, Py_NewRef(n->entries[i].object));
    }
    return list;
}

// ---- encoding

typedef struct {
    unsigned char *bytes;
    size_t length;
    size_t capacity;
    size_t meant;        // the length if nothing were a reference
    int deepest;         // depth of the deepest value of the containers that are open
    PyObject *fallback;  // called with an object that is not exactly plain data
    Numbering numbering;
    Numbering known;     // the containers of the message that is answered
} Writer;

static bool write_value(Writer *w, PyObject *value, int depth);

static bool too_large(void) {
    PyErr_SetString(PyExc_OverflowError, "value is too large to be sent");
    return false;
}

static bool too_deep(void) {
    PyErr_SetString(PyExc_ValueError, "value is nested too deeply, or cyclic");
    return false;
}

static bool write_bytes(Writer *w, const void *bytes, size_t length) {
    if (length > CODEC_MAX_BYTES - w->meant) {
        return too_large();
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
    w->meant += length;
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

// Writes a reference if the container occurred before, in this message or in the one that is answered. Returns 1 if it
// did, 0 if the container is to be written, now with a number, and -1 on failure.
static int write_reference(Writer *w, PyObject *container, int depth) {
    long number = numbering_find(&w->numbering, container);
    if (number >= 0) {
        Entry *entry = &w->numbering.entries[number];
        if (entry->size == 0 || depth + (int)entry->height > CODEC_MAX_DEPTH) {
            too_deep();
            return -1;
        }
        if (!write_head(w, 'r', (size_t)number)) {
            return -1;
        }
        if (entry->size > CODEC_MAX_BYTES - w->meant) {
            too_large();
            return -1;
        }
        w->meant += entry->size;
        w->deepest = Py_MAX(w->deepest, depth + (int)entry->height);
        return 1;
    }
    if (w->known.count > 0 && (number = numbering_find(&w->known, container)) >= 0) {
        return write_head(w, 'a', (size_t)number) ? 1 : -1;
    }
    if (!numbering_add(&w->numbering, container)) {
        return -1;
    }
    if (w->numbering.count > SEARCHED) {
        numbering_index(&w->numbering);
    }
    return 0;
}

// The fallback answers with a tuple of a str and a payload for a by-value type, of an int and a description for an object
// that stays here, or with the int of an object of the receiver's.
static bool write_answer(Writer *w, PyObject *answer, int depth) {
    if (PyTuple_CheckExact(answer) && PyTuple_GET_SIZE(answer) == 2) {
        PyObject *name = PyTuple_GET_ITEM(answer, 0);
        PyObject *payload = PyTuple_GET_ITEM(answer, 1);
        if (PyUnicode_CheckExact(name)) {
            return write_tag(w, 'v') && write_value(w, name, depth + 1) && write_value(w, payload, depth + 1);
        }
        unsigned long id = PyLong_AsUnsignedLong(name);
        return !PyErr_Occurred() && write_head(w, 'h', id) && write_value(w, payload, depth + 1);
    }
    unsigned long id = PyLong_AsUnsignedLong(answer);
    return !PyErr_Occurred() && write_head(w, 'o', id);
}

// Writes what a value holds as one of the built-in types, whatever its own type is.
static bool write_base(Writer *w, PyObject *value, int depth) {
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
    PyErr_Format(PyExc_TypeError, "cannot send a value of type `%.100s`", Py_TYPE(value)->tp_name);
    return false;
}

static bool is_scalar(PyTypeObject *type) {
    return type == &PyLong_Type || type == &PyUnicode_Type || type == &PyFloat_Type || type == &PyBytes_Type ||
           type == &PyComplex_Type;
}

static bool is_container(PyTypeObject *type) {
    return type == &PyList_Type || type == &PyTuple_Type || type == &PyDict_Type || type == &PySet_Type ||
           type == &PyFrozenSet_Type || type == &PyByteArray_Type;
}

// Writes a container, or what the fallback makes of a value, under a number.
static bool write_numbered(Writer *w, PyObject *value, PyObject *answer, int depth) {
    int reference = write_reference(w, value, depth);
    if (reference != 0) {
        return reference > 0;
    }
    size_t number = w->numbering.count - 1;
    size_t meant = w->meant;
    int deepest = w->deepest;
    w->deepest = depth;
    if (!(answer == NULL ? write_base(w, value, depth) : write_answer(w, answer, depth))) {
        return false;
    }
    Entry *entry = &w->numbering.entries[number];
    entry->size = (unsigned)(w->meant - meant);
    entry->height = (unsigned)(w->deepest - depth);
    w->deepest = Py_MAX(w->deepest, deepest);
    return true;
}

static bool write_other(Writer *w, PyObject *value, int depth) {
    PyObject *answer = PyObject_CallOneArg(w->fallback, value);
    if (answer == NULL) {
        return false;
    }
    bool ok;
    if (answer == Py_None) {
        bool is_scalar_base = PyLong_Check(value) || PyUnicode_Check(value) || PyFloat_Check(value) ||
                              PyBytes_Check(value) || PyComplex_Check(value);
        ok = is_scalar_base ? write_base(w, value, depth) : write_numbered(w, value, NULL, depth);
    } else if (PyTuple_CheckExact(answer) && PyTuple_GET_SIZE(answer) == 2 &&
               PyUnicode_CheckExact(PyTuple_GET_ITEM(answer, 0))) {
        ok = write_numbered(w, value, answer, depth);
    } else {
        ok = write_answer(w, answer, depth);
    }
    Py_DECREF(answer);
    return ok;
}

static bool write_value(Writer *w, PyObject *value, int depth) {
    if (depth > CODEC_MAX_DEPTH) {
        return too_deep();
    }
    w->deepest = Py_MAX(w->deepest, depth);
    if (value == Py_None) {
        return write_tag(w, 'N');
    }
    if (value == Py_True || value == Py_False) {
        return write_tag(w, value == Py_True ? 'T' : 'F');
    }
    PyTypeObject *type = Py_TYPE(value);
    if (is_scalar(type)) {
        return write_base(w, value, depth);
    }
    if (is_container(type)) {
        return write_numbered(w, value, NULL, depth);
    }
    return write_other(w, value, depth);
}

// encode(value, fallback, known) -> (bytes, numbered containers); `known` are the containers of the message that is
// answered, in order, or None.
PyObject *codec_encode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !(args[2] == Py_None || PyList_CheckExact(args[2]))) {
        PyErr_SetString(PyExc_TypeError, "encode(value, fallback, known)");
        return NULL;
    }
    Writer w = {.fallback = args[1]};
    bool ok = true;
    for (Py_ssize_t i = 0; ok && args[2] != Py_None && i < PyList_GET_SIZE(args[2]); i++) {
        ok = numbering_add(&w.known, PyList_GET_ITEM(args[2], i));
    }
    if (w.known.count > SEARCHED) {
        numbering_index(&w.known);
    }
    PyObject *result = NULL;
    if (ok && write_value(&w, args[0], 0)) {
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)w.bytes, (Py_ssize_t)w.length);
        PyObject *objects = bytes == NULL ? NULL : numbering_list(&w.numbering);
        result = objects == NULL ? NULL : PyTuple_Pack(2, bytes, objects);
        Py_XDECREF(bytes);
        Py_XDECREF(objects);
    }
    PyMem_RawFree(w.bytes);
    numbering_clear(&w.numbering);
    numbering_clear(&w.known);
    return result;
}

// ---- decoding

typedef struct {
    const unsigned char *next;
    const unsigned char *end;
    size_t meant;        // the bytes read so far, had nothing been a reference
    int deepest;         // depth of the deepest value of the containers that are open
    PyObject *by_value;  // called with (type name, payload)
    PyObject *handle;    // called with (id, description): an object that stays with the sender
    PyObject *own;       // called with (id): an object that the sender had from here
    PyObject *outer;     // list of the containers of the message that this one answers
    size_t outer_used;
    Numbering numbering;
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
    PyObject *description = read_value(r, depth + 1);
    if (description == NULL) {
        return NULL;
    }
    PyObject *value = PyObject_CallFunction(r->handle, "kO", (unsigned long)id, description);
    Py_DECREF(description);
    return value;
}

static PyObject *read_outer(Reader *r, uint32_t number) {
    if (r->outer == Py_None || number >= (size_t)PyList_GET_SIZE(r->outer)) {
        return malformed();
    }
    r->outer_used++;
    return Py_NewRef(PyList_GET_ITEM(r->outer, number));
}

static PyObject *read_reference(Reader *r, uint32_t number, int depth) {
    if (number >= r->numbering.count || r->numbering.entries[number].size == 0) {
        return malformed();
    }
    const Entry *entry = &r->numbering.entries[number];
    if (depth + (int)entry->height > CODEC_MAX_DEPTH || entry->size > CODEC_MAX_BYTES - r->meant) {
        return malformed();
    }
    r->meant += entry->size;
    r->deepest = Py_MAX(r->deepest, depth + (int)entry->height);
    return Py_NewRef(entry->object);
}

static PyObject *read_container(Reader *r, char tag, Py_ssize_t count, int depth) {
    switch (tag) {
    case 'v':
        return read_by_value(r, depth);
    case 'B':
        r->next += count;
        return PyByteArray_FromStringAndSize((const char *)r->next - count, count);
    case 'l':
    case 't':
        return read_sequence(r, count, tag == 'l', depth);
    case 'd':
        return read_dict(r, count, depth);
    default:
        return read_set(r, count, tag == 'z', depth);
    }
}

// Reads a container, whose tag and length begin at `start`, under a number.
static PyObject *read_numbered(Reader *r, const unsigned char *start, Py_ssize_t count, int depth) {
    size_t number = r->numbering.count;
    // References add to `meant`; the bytes themselves are counted here.
    size_t meant = r->meant;
    int deepest = r->deepest;
    if (!numbering_add(&r->numbering, NULL)) {
        return NULL;
    }
    r->deepest = depth;
    PyObject *value = read_container(r, (char)*start, count, depth);
    if (value != NULL) {
        Entry *entry = &r->numbering.entries[number];
        size_t size = (size_t)(r->next - start) + (r->meant - meant);
        if (size > CODEC_MAX_BYTES) {
            Py_DECREF(value);
            return malformed();
        }
        *entry = (Entry){
            .object = Py_NewRef(value), .size = (unsigned)size, .height = (unsigned)(r->deepest - depth)
        };
    }
    r->deepest = Py_MAX(r->deepest, deepest);
    return value;
}

static PyObject *read_value(Reader *r, int depth) {
    if (depth > CODEC_MAX_DEPTH || r->next == r->end) {
        return malformed();
    }
    r->deepest = Py_MAX(r->deepest, depth);
    const unsigned char *start = r->next;
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
        return read_numbered(r, start, 0, depth);
    }

    uint32_t number;
    if (!read_number(r, &number)) {
        return malformed();
    }
    switch (tag) {
    case 'h':
        return read_handle(r, number, depth);
    case 'o':
        return PyObject_CallFunction(r->own, "k", (unsigned long)number);
    case 'r':
        return read_reference(r, number, depth);
    case 'a':
        return read_outer(r, number);
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
    case 'l':
    case 't':
    case 'd':
    case 'S':
    case 'z':
        return read_numbered(r, start, count, depth);
    }
    return malformed();
}

// decode(bytes, by_value, handle, own, outer) -> (value, numbered containers, how many of `outer` occur); see Reader.
PyObject *codec_decode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyBytes_CheckExact(args[0]) || !(args[4] == Py_None || PyList_CheckExact(args[4]))) {
        PyErr_SetString(PyExc_TypeError, "decode(bytes, by_value, handle, own, outer)");
        return NULL;
    }
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    size_t length = (size_t)PyBytes_GET_SIZE(args[0]);
    if (length > CODEC_MAX_BYTES) {
        return malformed();
    }
    Reader r = {
        .next = bytes,
        .end = bytes + length,
        .meant = length,
        .by_value = args[1],
        .handle = args[2],
        .own = args[3],
        .outer = args[4],
    };
    PyObject *value = read_value(&r, 0);
    if (value != NULL && r.next != r.end) {
        Py_CLEAR(value);
    }
    // A list as a dict's key is malformed data like any other.
    if (value == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
    }
    PyObject *result = NULL;
    if (value == NULL) {
        malformed();
    } else {
        PyObject *objects = numbering_list(&r.numbering);
        if (objects != NULL) {
            result = Py_BuildValue("(NNn)", value, objects, (Py_ssize_t)r.outer_used);
        } else {
            Py_DECREF(value);
        }
    }
    numbering_clear(&r.numbering);
    return result;
}

// ---- what a call changes in place

// Returns a list of everything that a mutable container holds, or None if the object is none.
static PyObject *members_of(PyObject *object) {
    static PyObject *deque;
    if (PyList_Check(object)) {
        return PyList_GetSlice(object, 0, PyList_GET_SIZE(object));
    }
    if (PyODict_Check(object)) {
        return PyMapping_Items(object);
    }
    if (PyDict_Check(object)) {
        PyObject *members = PyList_New(0);
        Py_ssize_t position = 0;
        PyObject *key;
        PyObject *value;
        while (members != NULL && PyDict_Next(object, &position, &key, &value)) {
            if (PyList_Append(members, key) < 0 || PyList_Append(members, value) < 0) {
                Py_CLEAR(members);
            }
        }
        return members;
    }
    if (PySet_Check(object)) {
        return PySequence_List(object);
    }
    if (PyByteArray_Check(object)) {
        return PyBytes_FromStringAndSize(PyByteArray_AS_STRING(object), PyByteArray_GET_SIZE(object));
    }
    if (PyTuple_Check(object) || PyFrozenSet_Check(object)) {
        Py_RETURN_NONE;
    }
    if (deque == NULL) {
        PyObject *module = PyImport_ImportModule("collections");
        deque = module == NULL ? NULL : PyObject_GetAttrString(module, "deque");
        Py_XDECREF(module);
        if (deque == NULL) {
            return NULL;
        }
    }
    if ((PyObject *)Py_TYPE(object) == deque) {
        return PySequence_List(object);
    }
    Py_RETURN_NONE;
}

// Whether two answers of members_of are the same: for lists, the very same objects in the same order.
static bool is_same(PyObject *a, PyObject *b) {
    if (!PyList_CheckExact(a) || !PyList_CheckExact(b)) {
        return PyBytes_CheckExact(a) && PyBytes_CheckExact(b) && PyBytes_GET_SIZE(a) == PyBytes_GET_SIZE(b) &&
               memcmp(PyBytes_AS_STRING(a), PyBytes_AS_STRING(b), (size_t)PyBytes_GET_SIZE(a)) == 0;
    }
    if (PyList_GET_SIZE(a) != PyList_GET_SIZE(b)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(a); i++) {
        PyObject *x = PyList_GET_ITEM(a, i);
        PyObject *y = PyList_GET_ITEM(b, i);
        // The pairs of an OrderedDict are made anew each time.
        bool is_pair = PyTuple_CheckExact(x) && PyTuple_CheckExact(y) && PyTuple_GET_SIZE(x) == 2 &&
                       PyTuple_GET_SIZE(y) == 2;
        if (x != y && !(is_pair && PyTuple_GET_ITEM(x, 0) == PyTuple_GET_ITEM(y, 0) &&
                        PyTuple_GET_ITEM(x, 1) == PyTuple_GET_ITEM(y, 1))) {
            return false;
        }
    }
    return true;
}

// snapshot(objects) -> [(number, object, members)] for the mutable ones of numbered containers, or None for no such one.
PyObject *codec_snapshot(PyObject *Py_UNUSED(module), PyObject *objects) {
    if (!PyList_CheckExact(objects)) {
        PyErr_SetString(PyExc_TypeError, "snapshot(list)");
        return NULL;
    }
    PyObject *result = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); i++) {
        PyObject *object = PyList_GET_ITEM(objects, i);
        PyObject *members = PyTuple_CheckExact(object) ? Py_NewRef(Py_None) : members_of(object);
        PyObject *entry = NULL;
        if (members == Py_None) {
            Py_DECREF(members);
            continue;
        }
        if (members != NULL && (result != NULL || (result = PyList_New(0)) != NULL)) {
            entry = Py_BuildValue("(nOO)", i, object, members);
        }
        Py_XDECREF(members);
        if (entry == NULL || PyList_Append(result, entry) < 0) {
            Py_XDECREF(entry);
            Py_XDECREF(result);
            return NULL;
        }
        Py_DECREF(entry);
    }
    return result == NULL ? Py_NewRef(Py_None) : result;
}

// The content of a changed container, as a container of a built-in type.
static PyObject *content_of(PyObject *object, PyObject *members) {
    if (PyODict_Check(object)) {
        PyObject *content = PyDict_New();
        for (Py_ssize_t i = 0; content != NULL && i < PyList_GET_SIZE(members); i++) {
            PyObject *pair = PyList_GET_ITEM(members, i);
            if (PyDict_SetItem(content, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)) < 0) {
                Py_CLEAR(content);
            }
        }
        return content;
    }
    if (PyDict_Check(object)) {
        PyObject *content = PyDict_New();
        for (Py_ssize_t i = 0; content != NULL && i + 1 < PyList_GET_SIZE(members); i += 2) {
            if (PyDict_SetItem(content, PyList_GET_ITEM(members, i), PyList_GET_ITEM(members, i + 1)) < 0) {
                Py_CLEAR(content);
            }
        }
        return content;
    }
    if (PyAnySet_Check(object)) {
        return PySet_New(members);
    }
    return PyByteArray_Check(object) ? PyByteArray_FromObject(members) : Py_NewRef(members);
}

// changes(snapshot) -> [(number, content)] for those that hold something else than when the snapshot was made, or None.
PyObject *codec_changes(PyObject *Py_UNUSED(module), PyObject *snapshot) {
    if (!PyList_CheckExact(snapshot)) {
        PyErr_SetString(PyExc_TypeError, "changes(list)");
        return NULL;
    }
    PyObject *result = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(snapshot); i++) {
        PyObject *entry = PyList_GET_ITEM(snapshot, i);
        if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 3) {
            PyErr_SetString(PyExc_TypeError, "no snapshot");
            Py_XDECREF(result);
            return NULL;
        }
        PyObject *object = PyTuple_GET_ITEM(entry, 1);
        PyObject *members = members_of(object);
        bool is_unchanged = members != NULL && is_same(members, PyTuple_GET_ITEM(entry, 2));
        if (is_unchanged) {
            Py_DECREF(members);
            continue;
        }
        PyObject *pair = NULL;
        if (members != NULL && (result != NULL || (result = PyList_New(0)) != NULL)) {
            PyObject *content = content_of(object, members);
            pair = content == NULL ? NULL : Py_BuildValue("(ON)", PyTuple_GET_ITEM(entry, 0), content);
        }
        Py_XDECREF(members);
        if (pair == NULL || PyList_Append(result, pair) < 0) {
            Py_XDECREF(pair);
            Py_XDECREF(result);
            return NULL;
        }
        Py_DECREF(pair);
    }
    return result == NULL ? Py_NewRef(Py_None) : result;
}
