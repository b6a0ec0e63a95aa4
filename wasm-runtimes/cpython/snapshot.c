// Shaping the heap before the snapshot, so that a fresh step touches few of its pages.
//
// What a fresh step costs is the pages it writes: each is copied on write, and put back afterwards. On a plain snapshot
// most of them are written for a reference count or for a small hole in the heap. With what is done here a `print` writes
// 38 pages, where a prototype on a plain snapshot wrote 133.

#define Py_BUILD_CORE  // for the layouts of pools, code and the type cache

#include "guest.h"

#include "internal/pycore_code.h"
#include "internal/pycore_interp.h"
#include "internal/pycore_obmalloc.h"
#include "internal/pycore_opcode_metadata.h"

#include <stdlib.h>
#include <string.h>

// ---- immortal objects: INCREF and DECREF leave their pages alone

enum {
    FAILED_OFTEN = 4,  // the backoff after three failures
};

typedef struct {
    PyObject **items;
    size_t length;
    size_t capacity;
    int failed;
} Stack;

static void reach(Stack *stack, PyObject *object) {
    if (object == NULL || object->ob_refcnt == _Py_IMMORTAL_REFCNT) {
        return;
    }
    object->ob_refcnt = _Py_IMMORTAL_REFCNT;
    if (stack->length == stack->capacity) {
        size_t capacity = stack->capacity == 0 ? 65536 : stack->capacity * 2;
        PyObject **grown = realloc(stack->items, capacity * sizeof *grown);
        if (grown == NULL) {
            stack->failed = 1;
            return;
        }
        stack->items = grown;
        stack->capacity = capacity;
    }
    stack->items[stack->length++] = object;
}

static int visit(PyObject *object, void *stack) {
    reach(stack, object);
    return 0;
}

// Code objects are not garbage-collected, so nothing traverses them.
static void reach_code_members(Stack *stack, PyCodeObject *code) {
    reach(stack, code->co_consts);
    reach(stack, code->co_names);
    reach(stack, code->co_localsplusnames);
    reach(stack, code->co_localspluskinds);
    reach(stack, code->co_filename);
    reach(stack, code->co_name);
    reach(stack, code->co_qualname);
    reach(stack, code->co_linetable);
    reach(stack, code->co_exceptiontable);
}

// Stops the counters of instructions whose specialization has failed again and again: counting on would write to the
// code's page in every step.
static void settle_code(PyCodeObject *code) {
    _Py_CODEUNIT *unit = _PyCode_CODE(code);
    _Py_CODEUNIT *end = unit + Py_SIZE(code);
    while (unit < end) {
        int generic = _PyOpcode_Deopt[unit->op.code];
        int caches = _PyOpcode_Caches[generic];
        if (caches > 0 && generic == unit->op.code && unit[1].counter.backoff >= FAILED_OFTEN) {
            unit[1].counter = initial_unreachable_backoff_counter();
        }
        unit += 1 + caches;
    }
}

static void reach_members(Stack *stack, PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    reach(stack, (PyObject *)type);
    if (PyCode_Check(object)) {
        reach_code_members(stack, (PyCodeObject *)object);
        settle_code((PyCodeObject *)object);
    } else if (PyDict_Check(object)) {
        // Its traversal skips the keys when all of them are strings.
        Py_ssize_t position = 0;
        PyObject *key;
        PyObject *value;
        while (PyDict_Next(object, &position, &key, &value)) {
            reach(stack, key);
            reach(stack, value);
        }
    }
    if (PyType_HasFeature(type, Py_TPFLAGS_HAVE_GC) && type->tp_traverse != NULL) {
        type->tp_traverse(object, visit, stack);
    }
}

// Makes every object that the garbage collector can reach immortal. Returns -1 with an exception set on failure.
int snapshot_make_immortal(void) {
    PyObject *gc = PyImport_ImportModule("gc");
    PyObject *objects = gc == NULL ? NULL : PyObject_CallMethod(gc, "get_objects", NULL);
    Py_XDECREF(gc);
    if (objects == NULL) {
        return -1;
    }
    Stack stack = {0};
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); i++) {
        reach(&stack, PyList_GET_ITEM(objects, i));
        while (stack.length > 0) {
            reach_members(&stack, stack.items[--stack.length]);
        }
    }
    // Names that only the cache still holds; a step that replaces an entry would free them.
    struct type_cache *cache = &PyInterpreterState_Get()->types.type_cache;
    for (size_t i = 0; i < Py_ARRAY_LENGTH(cache->hashtable); i++) {
        reach(&stack, cache->hashtable[i].name);
    }
    free(stack.items);
    Py_DECREF(objects);
    if (stack.failed) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

// ---- small objects: pymalloc's pools

static size_t arenas_allocated;

// Aligned to pools, so that none is lost and each lies on one page.
static void *allocate_arena(void *Py_UNUSED(context), size_t size) {
    arenas_allocated++;
    return aligned_alloc(POOL_SIZE, size);
}

static void free_arena(void *Py_UNUSED(context), void *arena, size_t Py_UNUSED(size)) {
    free(arena);
}

// Before the first allocation of an object.
void snapshot_set_arena_allocator(void) {
    PyObjectArenaAllocator allocator = {.alloc = allocate_arena, .free = free_arena};
    PyObject_SetArenaAllocator(&allocator);
}

// Occupies every free block of the pools in use and every free pool of the arenas in use. New objects then lie in pools
// side by side, in an arena that nothing else uses.
static void fill_pools(void) {
    // Freed integers lie anywhere; as many new ones as the free list may hold (integer.patch) take them off it.
    for (long i = 0; i < 100; i++) {
        PyLong_FromLong(1000 + i);
    }
    for (size_t size = ALIGNMENT; size <= SMALL_REQUEST_THRESHOLD; size += ALIGNMENT) {
        void *block;
        while ((block = PyObject_Calloc(1, size)) != NULL && POOL_ADDR(block)->ref.count > 1) {
        }
        PyObject_Free(block);  // the first of a pool
    }
    size_t before = arenas_allocated;
    void *block;
    while ((block = PyObject_Calloc(1, SMALL_REQUEST_THRESHOLD)) != NULL && arenas_allocated == before) {
    }
    PyObject_Free(block);  // the first of an arena
}

// ---- the heap: no holes below the top, and a top that is large enough

enum {
    LARGEST_HOLE = 1 << 20,
    SMALLEST_HOLE = 16,
    TOP_RESERVE = 12 << 20,
};

// Occupies every free hole of the heap and leaves TOP_RESERVE free bytes in one piece at its top. New objects then lie
// side by side on few pages, and a short step never grows the memory. The holes are lost for good (a few MiB, zeroed, so
// that they compress to nothing).
void snapshot_fill_heap(void) {
    fill_pools();

    // A block larger than any hole comes from the top: where it starts, the holes end.
    char *probe = malloc(4 * (size_t)LARGEST_HOLE);
    uintptr_t top = (uintptr_t)probe;
    free(probe);

    // From large to small, so that a large hole is not broken up by small blocks.
    size_t size = LARGEST_HOLE;
    while (size >= SMALLEST_HOLE) {
        char *block = malloc(size);
        if (block != NULL && (uintptr_t)block < top) {
            memset(block, 0, size);
            continue;
        }
        free(block);
        size -= size > 4096 ? size / 16 : 16;
    }
    free(malloc(TOP_RESERVE));
}
