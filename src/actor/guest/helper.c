/* What an actor under gVisor starts with: its first process, and the step between `runsc exec` and a
 * program. It calls the kernel itself and needs no file of the root filesystem. `build.sh` builds it.
 *
 *   helper init                      adopts and buries orphans; on SIGUSR1 it kills everybody else
 *   helper settled                   ends by SIGTERM once the first process has no killing left to do
 *   helper make UID GID FOLDER ...   makes the folders that are missing, and gives them to the user
 *   helper exec FOLDER PROGRAM ...   enters the folder and becomes the program, looked up in PATH
 */

#define SYS_write 1
#define SYS_close 3
#define SYS_rt_sigprocmask 14
#define SYS_pause 34
#define SYS_nanosleep 35
#define SYS_execve 59
#define SYS_exit 60
#define SYS_wait4 61
#define SYS_kill 62
#define SYS_chdir 80
#define SYS_mkdir 83
#define SYS_chown 92
#define SYS_rt_sigtimedwait 128
#define SYS_statx 332
#define SYS_close_range 436

#define ENOENT 2
#define EACCES 13
#define EEXIST 17
#define ENOTDIR 20
#define EINVAL 22

#define SIGKILL 9
#define SIGUSR1 10
#define SIGUSR2 12
#define SIGTERM 15
#define SIGCHLD 17

typedef unsigned long word;

static long call(long number, long a, long b, long c, long d, long e) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

static word length(const char *text) {
    word size = 0;
    while (text[size]) size++;
    return size;
}

static void say(const char *text) { call(SYS_write, 2, (long)text, (long)length(text), 0, 0); }

__attribute__((noreturn)) static void leave(long code) {
    for (;;) call(SYS_exit, code, 0, 0, 0, 0);
}

__attribute__((noreturn)) static void fail(const char *why, const char *name, long code) {
    say(why);
    say(name);
    say("\n");
    leave(code);
}

/* Returns whether there is a child that has not ended. */
static int bury(void) {
    long child;
    do child = call(SYS_wait4, -1, 0, 1 /* WNOHANG */, 0, 0);
    while (child > 0);
    return child == 0;
}

__attribute__((noreturn)) static void init(void) {
    word signals = 1UL << (SIGUSR1 - 1) | 1UL << (SIGUSR2 - 1) | 1UL << (SIGCHLD - 1);
    int about[32]; /* a siginfo_t, whose fifth number is the sender */
    /* Through these others could write to files of the host's: its log of this actor. */
    for (long file = 0; file < 3; file++) call(SYS_close, file, 0, 0, 0, 0);
    call(SYS_rt_sigprocmask, 0 /* SIG_BLOCK */, (long)&signals, 0, 8, 0);
    for (;;) {
        /* The lowest that waits comes first: whoever asks by SIGUSR2 is answered after all killing. */
        long signal = call(SYS_rt_sigtimedwait, (long)&signals, (long)about, 0, 8, 0);
        if (signal == SIGUSR2 && about[4] > 1) call(SYS_kill, about[4], SIGTERM, 0, 0, 0);
        /* Whoever forks meanwhile is met in a later round. */
        for (int round = 0; signal == SIGUSR1 && round < 500; round++) {
            long pause[2] = {0, 1000000};
            call(SYS_kill, -1, SIGKILL, 0, 0, 0);
            call(SYS_nanosleep, (long)pause, 0, 0, 0, 0);
            if (!bury() && round > 2) break;
        }
        bury();
    }
}

static long number(const char *digits) {
    long value = 0;
    for (; *digits >= '0' && *digits <= '9'; digits++) value = value * 10 + (*digits - '0');
    return value;
}

/* Makes a folder and those above it. */
static void make(char *path, long uid, long gid) {
    long error = 0;
    for (char *at = path + 1;; at++) {
        char was = *at;
        if (was != '/' && was) continue;
        *at = 0;
        error = call(SYS_mkdir, (long)path, 0755, 0, 0, 0);
        *at = was;
        if (!was) break;
    }
    if (error == -EEXIST) return;
    if (error < 0) fail("wardian: cannot be made: ", path, 1);
    call(SYS_chown, (long)path, uid, gid, 0, 0);
}

/* gVisor before 2023 refuses the flag AT_NO_AUTOMOUNT, with which `ls` and `stat` of coreutils 9 look at
 * everything; `mend.c` leaves it out for them. Returns the variables, with it where it is needed. */
static char **mended(char **variables) {
    static char *more[4096];
    static char mend[] = "LD_PRELOAD=/.wardian/mend.so";
    char found[256];
    if (call(SYS_statx, -100 /* AT_FDCWD */, (long)"/", 0x800 /* AT_NO_AUTOMOUNT */, 0x7ff, (long)found) !=
        -EINVAL)
        return variables;
    word at = 0;
    for (; variables[at]; at++) {
        if (at + 2 >= sizeof more / sizeof *more) return variables;
        word same = 0;
        while (same < 11 && variables[at][same] == mend[same]) same++;
        if (same == 11) return variables; /* the program has its own */
        more[at] = variables[at];
    }
    more[at] = mend;
    more[at + 1] = 0;
    return more;
}

/* Becomes the program, or returns why not. */
static long become(char **arguments, char **variables) {
    const char *name = arguments[0];
    for (const char *at = name; *at; at++)
        if (*at == '/') return call(SYS_execve, (long)name, (long)arguments, (long)variables, 0, 0);
    const char *folders = "/usr/bin:/bin";
    for (char **variable = variables; *variable; variable++) {
        const char *text = *variable;
        if (text[0] == 'P' && text[1] == 'A' && text[2] == 'T' && text[3] == 'H' && text[4] == '=')
            folders = text + 5;
    }
    static char path[4096];
    word size = length(name);
    long why = -ENOENT;
    while (size && *folders) {
        word at = 0;
        for (; *folders && *folders != ':'; folders++)
            if (at < sizeof path) path[at++] = *folders;
        if (*folders == ':') folders++;
        if (at + size + 2 > sizeof path) continue;
        path[at++] = '/';
        for (word i = 0; i <= size; i++) path[at + i] = name[i];
        long error = call(SYS_execve, (long)path, (long)arguments, (long)variables, 0, 0);
        if (error != -ENOENT && error != -ENOTDIR) why = error;
        if (error != -ENOENT && error != -ENOTDIR && error != -EACCES) break;
    }
    return why;
}

__attribute__((noreturn, used)) static void start(word *stack) {
    long count = (long)stack[0];
    char **arguments = (char **)(stack + 1);
    char **variables = arguments + count + 1;
    if (count == 2 && arguments[1][0] == 'i') init();
    if (count == 2 && arguments[1][0] == 's') {
        call(SYS_kill, 1, SIGUSR2, 0, 0, 0);
        for (;;) call(SYS_pause, 0, 0, 0, 0, 0);
    }
    if (count > 3 && arguments[1][0] == 'm') {
        for (long at = 4; at < count; at++) make(arguments[at], number(arguments[2]), number(arguments[3]));
        leave(0);
    }
    if (count < 4) fail("wardian: no program", "", 126);
    if (call(SYS_chdir, (long)arguments[2], 0, 0, 0, 0) < 0)
        fail("wardian: cannot enter ", arguments[2], 126);
    /* What the host forgot to close is none of the program's business. */
    if (call(SYS_close_range, 3, ~0U, 0, 0, 0) < 0)
        for (long file = 3; file < 1024; file++) call(SYS_close, file, 0, 0, 0, 0);
    long why = become(arguments + 3, mended(variables));
    if (why == -ENOENT) fail("wardian: not found: ", arguments[3], 127);
    fail("wardian: cannot be run: ", arguments[3], 126);
}

__asm__(".globl _start\n_start:\n  xor %ebp, %ebp\n  mov %rsp, %rdi\n  and $-16, %rsp\n  call start\n");
