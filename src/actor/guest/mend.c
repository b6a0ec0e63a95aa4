/* A library that programs under an old gVisor are given by LD_PRELOAD (see `helper.c`): it leaves out
 * AT_NO_AUTOMOUNT, a flag without meaning there that makes the call fail. */

#define AT_NO_AUTOMOUNT 0x800

extern int *__errno_location(void);

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

static int answer(long result) {
    if (result >= 0) return (int)result;
    *__errno_location() = (int)-result;
    return -1;
}

int statx(int folder, const char *path, int flags, unsigned mask, void *found) {
    return answer(call(332, folder, (long)path, flags & ~AT_NO_AUTOMOUNT, mask, (long)found));
}

int fstatat(int folder, const char *path, void *found, int flags) {
    return answer(call(262, folder, (long)path, (long)found, flags & ~AT_NO_AUTOMOUNT, 0));
}

int fstatat64(int folder, const char *path, void *found, int flags) {
    return fstatat(folder, path, found, flags);
}
