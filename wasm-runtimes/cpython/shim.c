// The guest's exports, over CPython's C API.
//
//   init()                 once, before the snapshot: starts the interpreter and runs the boot modules read from stdin
//   buf(n) -> ptr          a buffer of at least n bytes, for what follows
//   step(n, seed) -> i32   runs the program in buf[0..n] as __main__ and returns its exit status, or 256 for MemoryError
//   args(n)                makes buf[0..n], arguments each ended by a NUL, sys.argv[1:] of the steps that follow
//   serve(n) -> len        answers the host's message in buf[0..n]; -1 on failure
//   answer(n) -> len       the same for a message from the other side of the bridge, also within a bridge.call
//   reply_ptr() -> ptr     where the reply lies, until the next call
//
// A program is run from here, not from Python: so its frames have no frame of ours below them, tracebacks and
// sys._getframe() look as under `python main.py`, and nothing it does to Python-level state can change how its exit
// status is reported.

#include "guest.h"
#include "vfs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT(name) __attribute__((export_name(name), visibility("default")))
#define IMPORT(name) __attribute__((import_module("bridge"), import_name(name)))

IMPORT("call") int bridge_call(const void *request, size_t length);
IMPORT("take") int bridge_take(void *reply, size_t length);
IMPORT("open") int bridge_open(const void *note, size_t length);
IMPORT("printed") int bridge_printed(int stream);

enum {
    STATUS_ERROR = 1,
    STATUS_FLUSH_FAILED = 120,  // as CPython's own
    STATUS_INTERRUPTED = 130,
    STATUS_OUT_OF_MEMORY = 256,
    SMALLEST_BUFFER = 64 << 10,
};

// `step` leaves the random module as it is when given this seed.
#define SEED_KEEP UINT64_MAX

static char *buffer;
static size_t buffer_size;
static PyObject *reply;

// Looked up once, before a program can replace them.
static struct {
    PyObject *begin_step;     // _wardian.begin_step(source, seed or None) -> file name
    PyObject *set_arguments;  // _wardian.set_arguments(bytes)
    PyObject *serve;          // _wardian.serve(request) -> bytes
    PyObject *answer;         // _wardian.answer(request) -> bytes
    PyObject *failed;         // _wardian.FAILED, bytes
    PyObject *compile;        // builtins.compile
    PyObject *run_exitfuncs;  // atexit._run_exitfuncs
    PyObject *main_globals;
    PyObject *mode;           // "exec"
} hooks;

// ---- one step

// The exit status that `SystemExit` asks for. Writes a non-numeric code to stderr, as CPython does.
static int status_of_exit(PyObject *exception) {
    int status = STATUS_ERROR;
    PyObject *code = PyObject_GetAttrString(exception, "code");
    if (code == NULL) {
        PyErr_Clear();
    } else if (code == Py_None) {
        status = 0;
    } else if (PyLong_Check(code)) {
        // A number out of range counts as -1, hence 255.
        status = (int)PyLong_AsLong(code) & 0xff;
        PyErr_Clear();
    } else {
        PyObject *file = Py_XNewRef(PySys_GetObject("stderr"));
        if (file != NULL && file != Py_None) {
            PyFile_WriteObject(code, file, Py_PRINT_RAW);
            PyErr_Clear();
            PyFile_WriteString("\n", file);
        }
        PyErr_Clear();
        Py_XDECREF(file);
    }
    Py_XDECREF(code);
    return status;
}

// Reports the pending exception through sys.excepthook and returns the program's exit status.
static int status_of_exception(void) {
    if (PyErr_ExceptionMatches(PyExc_SystemExit)) {
        PyObject *exception = PyErr_GetRaisedException();
        int status = status_of_exit(exception);
        Py_DECREF(exception);
        return status;
    }
    int status = STATUS_ERROR;
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) {
        status = STATUS_OUT_OF_MEMORY;
    } else if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        status = STATUS_INTERRUPTED;
    }
    PyErr_PrintEx(0);
    return status;
}

// Flushes one of the sys streams. A stream that is gone or closed counts as flushed.
static int flush(const char *name) {
    PyObject *file = Py_XNewRef(PySys_GetObject(name));
    if (file == NULL || file == Py_None) {
        Py_XDECREF(file);
        return 0;
    }
    int failed = 0;
    PyObject *closed = PyObject_GetAttrString(file, "closed");
    if (closed == NULL) {
        PyErr_Clear();
    }
    if (closed == NULL || !PyObject_IsTrue(closed)) {
        PyObject *flushed = PyObject_CallMethod(file, "flush", NULL);
        failed = flushed == NULL;
        Py_XDECREF(flushed);
    }
    if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(file);
    }
    Py_XDECREF(closed);
    Py_DECREF(file);
    return failed ? -1 : 0;
}

// What CPython does between a program's end and the process's end, as far as it can be seen from outside.
static int end_step(int status) {
    PyObject *done = PyObject_CallNoArgs(hooks.run_exitfuncs);
    if (done == NULL) {
        PyErr_WriteUnraisable(hooks.run_exitfuncs);
    }
    Py_XDECREF(done);
    // sys.stdout may be the program's own; what is still in the original one must come out too.
    int failed = flush("stdout");
    failed |= flush("stderr");
    failed |= flush("__stdout__");
    flush("__stderr__");
    return failed && status == 0 ? STATUS_FLUSH_FAILED : status;
}

static PyObject *execute(PyObject *source, PyObject *seed) {
    PyObject *file_name = PyObject_CallFunctionObjArgs(hooks.begin_step, source, seed, NULL);
    if (file_name == NULL) {
        return NULL;
    }
    PyObject *code = PyObject_CallFunctionObjArgs(hooks.compile, source, file_name, hooks.mode, Py_False, Py_True, NULL);
    Py_DECREF(file_name);
    if (code == NULL) {
        return NULL;
    }
    PyObject *result = PyEval_EvalCode(code, hooks.main_globals, hooks.main_globals);
    Py_DECREF(code);
    return result;
}

static int run_step(PyObject *source, PyObject *seed) {
    PyObject *result = execute(source, seed);
    int status = result == NULL ? status_of_exception() : 0;
    Py_XDECREF(result);
    return end_step(status);
}

EXPORT("step") int guest_step(int length, uint64_t seed) {
    PyObject *source = PyBytes_FromStringAndSize(buffer, length);
    PyObject *seed_object = seed == SEED_KEEP ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(seed);
    int status = STATUS_OUT_OF_MEMORY;
    if (source != NULL && seed_object != NULL) {
        status = run_step(source, seed_object);
    }
    PyErr_Clear();
    Py_XDECREF(source);
    Py_XDECREF(seed_object);
    return status;
}

// ---- messages

EXPORT("args") void guest_args(int length) {
    PyObject *done = PyObject_CallFunction(hooks.set_arguments, "y#", buffer, (Py_ssize_t)length);
    PyErr_Clear();
    Py_XDECREF(done);
}

EXPORT("buf") void *guest_buf(int length) {
    size_t wanted = length < SMALLEST_BUFFER ? SMALLEST_BUFFER : (size_t)length;
    if (wanted > buffer_size) {
        free(buffer);
        buffer = malloc(wanted);
        buffer_size = buffer == NULL ? 0 : wanted;
    }
    return buffer;
}

// Calls `hook` with the message in the buffer; `failed` is the reply when it makes none. While it runs, the guest may be entered again and `reply` be replaced, so
// it is set only at the end.
static int reply_to(PyObject *hook, PyObject *failed, int length) {
    Py_CLEAR(reply);
    PyObject *request = PyBytes_FromStringAndSize(buffer, length);
    PyObject *answer = NULL;
    if (request != NULL) {
        answer = PyObject_CallOneArg(hook, request);
        Py_DECREF(request);
    }
    if (answer == NULL || !PyBytes_CheckExact(answer)) {
        PyErr_Clear();
        Py_XDECREF(answer);
        if (failed == NULL) {
            return -1;
        }
        answer = Py_NewRef(failed);
    }
    Py_XSETREF(reply, answer);
    return (int)PyBytes_GET_SIZE(reply);
}

EXPORT("serve") int guest_serve(int length) {
    return reply_to(hooks.serve, NULL, length);
}

EXPORT("answer") int guest_answer(int length) {
    return reply_to(hooks.answer, hooks.failed, length);
}

EXPORT("reply_ptr") void *guest_reply_ptr(void) {
    return reply == NULL ? NULL : PyBytes_AS_STRING(reply);
}

// ---- the module `_wardian_guest`, for the boot modules

// Fetches the reply of `size` bytes that the host keeps, or returns the negative number that it answered.
static PyObject *take_reply(int size) {
    if (size < 0) {
        return PyLong_FromLong(size);
    }
    if ((size_t)size > CODEC_MAX_BYTES) {
        PyErr_SetString(PyExc_ValueError, "reply is too large");
        return NULL;
    }
    PyObject *answer = PyBytes_FromStringAndSize(NULL, size);
    if (answer != NULL && bridge_take(PyBytes_AS_STRING(answer), (size_t)size) != size) {
        Py_CLEAR(answer);
        PyErr_SetString(PyExc_ValueError, "reply is not there");
    }
    return answer;
}

// bridge_call(request) -> bytes, or the negative number that the host answered.
static PyObject *py_bridge_call(PyObject *Py_UNUSED(module), PyObject *request) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(request, &bytes, &length) < 0) {
        return NULL;
    }
    return take_reply(bridge_call(bytes, (size_t)length));
}

// bridge_open(note) -> whether a new round was opened.
static PyObject *py_bridge_open(PyObject *Py_UNUSED(module), PyObject *note) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(note, &bytes, &length) < 0) {
        return NULL;
    }
    return PyBool_FromLong(bridge_open(bytes, (size_t)length) == 0);
}

// bridge_printed(stream) -> bytes that the other side printed, or the negative number that the host answered.
static PyObject *py_bridge_printed(PyObject *Py_UNUSED(module), PyObject *stream) {
    long number = PyLong_AsLong(stream);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return take_reply(bridge_printed((int)number));
}

// run_step(source, seed) -> status: `step` for the warm-up.
static PyObject *py_run_step(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "run_step(source, seed)");
        return NULL;
    }
    return PyLong_FromLong(run_step(args[0], args[1]));
}

// seal(path): makes everything below a path of the file system read-only.
static PyObject *py_seal(PyObject *Py_UNUSED(module), PyObject *path) {
    const char *name = PyUnicode_AsUTF8(path);
    if (name == NULL) {
        return NULL;
    }
    errno = vfs_seal(name);
    return errno == 0 ? Py_NewRef(Py_None) : PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *py_stdlib(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args)) {
    return Py_BuildValue("(NN)", stdlib_index(), stdlib_code());
}

static PyMethodDef module_methods[] = {
    {"bridge_call", py_bridge_call, METH_O, NULL},
    {"bridge_open", py_bridge_open, METH_O, NULL},
    {"bridge_printed", py_bridge_printed, METH_O, NULL},
    {"changes", codec_changes, METH_O, NULL},
    {"decode", (PyCFunction)(void *)codec_decode, METH_FASTCALL, NULL},
    {"encode", (PyCFunction)(void *)codec_encode, METH_FASTCALL, NULL},
    {"run_step", (PyCFunction)(void *)py_run_step, METH_FASTCALL, NULL},
    {"seal", py_seal, METH_O, NULL},
    {"snapshot", codec_snapshot, METH_O, NULL},
    {"stdlib", py_stdlib, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_wardian_guest", .m_size = -1, .m_methods = module_methods,
};

static PyObject *module_init(void) {
    return PyModule_Create(&module_definition);
}

// ---- start

static _Noreturn void fail(const char *activity, const char *reason) {
    if (PyErr_Occurred()) {
        PyErr_Print();
    }
    fprintf(stderr, "guest: %s failed%s%s\n", activity, reason == NULL ? "" : ": ", reason == NULL ? "" : reason);
    abort();
}

static void check(PyStatus status, const char *activity) {
    if (PyStatus_Exception(status)) {
        fail(activity, status.err_msg);
    }
}

// Starts the interpreter as `python -I -X utf8 main.py` would be, less the search for files.
static void start_interpreter(void) {
    PyPreConfig preconfig;
    PyPreConfig_InitIsolatedConfig(&preconfig);
    preconfig.utf8_mode = 1;
    check(Py_PreInitialize(&preconfig), "pre-initialization");

    stdlib_register_early_modules();
    if (PyImport_AppendInittab("_wardian_guest", module_init) < 0) {
        fail("registering the guest's module", NULL);
    }

    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    config.buffered_stdio = 1;
    config.parse_argv = 0;
    config.pathconfig_warnings = 0;
    config.site_import = 0;  // what a program misses of it is in _wardian.py
    config.write_bytecode = 0;
    // Every instance of a snapshot has the same hash seed anyway; a constant one makes the snapshot reproducible.
    config.use_hash_seed = 1;
    config.hash_seed = 0;
    static const struct {
        size_t offset;
        const wchar_t *value;
    } strings[] = {
        {offsetof(PyConfig, program_name), L"python"},
        {offsetof(PyConfig, executable), L""},
        {offsetof(PyConfig, base_executable), L""},
        {offsetof(PyConfig, prefix), L"/"},
        {offsetof(PyConfig, base_prefix), L"/"},
        {offsetof(PyConfig, exec_prefix), L"/"},
        {offsetof(PyConfig, base_exec_prefix), L"/"},
        {offsetof(PyConfig, stdlib_dir), L"/lib/python3.13"},
        {offsetof(PyConfig, stdio_encoding), L"utf-8"},
        {offsetof(PyConfig, stdio_errors), L"surrogateescape"},
    };
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        wchar_t **field = (wchar_t **)((char *)&config + strings[i].offset);
        check(PyConfig_SetString(&config, field, strings[i].value), "configuration");
    }
    wchar_t *argv[] = {L"main.py"};
    check(PyConfig_SetArgv(&config, 1, argv), "configuration");
    config.module_search_paths_set = 1;
    // What a program finds beside itself; the standard library comes before it (stage0.py).
    static const wchar_t *search[] = {L"/work", L"/lib/python3.13", L"/lib/python3.13/site-packages"};
    for (size_t i = 0; i < sizeof search / sizeof *search; i++) {
        check(PyWideStringList_Append(&config.module_search_paths, search[i]), "configuration");
    }
    check(Py_InitializeFromConfig(&config), "initialization");
    PyConfig_Clear(&config);
}

static PyObject *attribute(const char *module_name, const char *name) {
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *value = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    if (value == NULL) {
        fail("looking up a hook", name);
    }
    return value;
}

static void call_hook(PyObject *hook, const char *activity) {
    PyObject *done = PyObject_CallNoArgs(hook);
    if (done == NULL) {
        fail(activity, NULL);
    }
    Py_DECREF(done);
    Py_DECREF(hook);
}

EXPORT("init") void guest_init(void) {
    snapshot_set_arena_allocator();
    vfs_init();
    // Where a program's relative paths start.
    if (chdir("/work") != 0) {
        fail("entering the working directory", NULL);
    }
    start_interpreter();
    // Reads the boot modules from file descriptor 0, beside Python's sys.stdin, which therefore stays unread.
    call_hook(attribute("_wardian_stage0", "boot"), "boot");

    hooks.begin_step = attribute("_wardian", "begin_step");
    hooks.set_arguments = attribute("_wardian", "set_arguments");
    hooks.serve = attribute("_wardian", "serve");
    hooks.answer = attribute("_wardian", "answer");
    hooks.failed = attribute("_wardian", "FAILED");
    hooks.compile = attribute("builtins", "compile");
    hooks.run_exitfuncs = attribute("atexit", "_run_exitfuncs");
    hooks.main_globals = attribute("__main__", "__dict__");
    hooks.mode = PyUnicode_InternFromString("exec");
    guest_buf(SMALLEST_BUFFER);

    call_hook(attribute("_wardian", "warm_up"), "warm-up");
    call_hook(attribute("_wardian_stage0", "hide"), "hiding the boot modules");
    call_hook(attribute("gc", "collect"), "garbage collection");
    if (snapshot_make_immortal() < 0) {
        fail("making objects immortal", NULL);
    }
    call_hook(attribute("gc", "freeze"), "freezing the heap");
    snapshot_fill_heap();
}
