// The operating system that libc sees: WASI preview 1 over the tree of vfs.c.
//
// libc reaches the system through the functions `__wasi_…`, which its own objects would import from the host. They are
// defined here instead, so those objects are not linked and the module imports only what the host alone can do: the three
// standard streams, the clock, sleeping, random bytes and the end of the process. A few functions of libc itself are
// replaced as well, because WASI has no permission bits.

#include "vfs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- the host

#define HOST(name) __attribute__((import_module("wasi_snapshot_preview1"), import_name(name)))

HOST("clock_time_get") int host_clock_time_get(uint32_t id, uint64_t precision, uint64_t *time);
HOST("fd_read") int host_fd_read(int fd, const __wasi_iovec_t *buffers, size_t count, __wasi_size_t *read);
HOST("fd_write") int host_fd_write(int fd, const __wasi_ciovec_t *buffers, size_t count, __wasi_size_t *written);
HOST("poll_oneoff")
int host_poll_oneoff(const __wasi_subscription_t *in, __wasi_event_t *out, size_t count, __wasi_size_t *fired);
HOST("proc_exit") _Noreturn void host_proc_exit(uint32_t code);
HOST("random_get") int host_random_get(uint8_t *bytes, size_t length);

Errno __wasi_clock_res_get(__wasi_clockid_t id, __wasi_timestamp_t *resolution) {
    *resolution = 1000;  // the step of the host's clock, in nanoseconds
    return id <= __WASI_CLOCKID_THREAD_CPUTIME_ID ? 0 : __WASI_ERRNO_INVAL;
}

Errno __wasi_clock_time_get(__wasi_clockid_t id, __wasi_timestamp_t precision, __wasi_timestamp_t *time) {
    return (Errno)host_clock_time_get(id, precision, time);
}

Errno __wasi_poll_oneoff(const __wasi_subscription_t *in, __wasi_event_t *out, size_t count, __wasi_size_t *fired) {
    return (Errno)host_poll_oneoff(in, out, count, fired);
}

_Noreturn void __wasi_proc_exit(__wasi_exitcode_t code) {
    host_proc_exit(code);
}

Errno __wasi_random_get(uint8_t *bytes, __wasi_size_t length) {
    return (Errno)host_random_get(bytes, length);
}

Errno __wasi_sched_yield(void) {
    return 0;
}

// ---- no arguments, no environment, no sockets

static Errno nothing(__wasi_size_t *count, __wasi_size_t *size) {
    *count = 0;
    *size = 0;
    return 0;
}

Errno __wasi_args_sizes_get(__wasi_size_t *count, __wasi_size_t *size) {
    return nothing(count, size);
}

Errno __wasi_args_get(uint8_t **arguments, uint8_t *bytes) {
    return 0;
}

Errno __wasi_environ_sizes_get(__wasi_size_t *count, __wasi_size_t *size) {
    return nothing(count, size);
}

Errno __wasi_environ_get(uint8_t **variables, uint8_t *bytes) {
    return 0;
}

Errno __wasi_sock_accept(__wasi_fd_t fd, __wasi_fdflags_t flags, __wasi_fd_t *accepted) {
    return __WASI_ERRNO_NOTSOCK;
}

Errno __wasi_sock_recv(__wasi_fd_t fd, const __wasi_iovec_t *buffers, size_t count, __wasi_riflags_t flags,
                       __wasi_size_t *received, __wasi_roflags_t *flags_out) {
    return __WASI_ERRNO_NOTSOCK;
}

Errno __wasi_sock_send(__wasi_fd_t fd, const __wasi_ciovec_t *buffers, size_t count, __wasi_siflags_t flags,
                       __wasi_size_t *sent) {
    return __WASI_ERRNO_NOTSOCK;
}

Errno __wasi_sock_shutdown(__wasi_fd_t fd, __wasi_sdflags_t how) {
    return __WASI_ERRNO_NOTSOCK;
}

// ---- file descriptors

enum {
    STREAMS = 3,       // 0 to 2 belong to the host, and cannot be closed: the next step of a session needs them
    ROOT_FD = STREAMS,  // what libc resolves absolute paths against; a program sees it as not open
    FIRST_FD,
    MAX_FDS = 256,
};

typedef struct {
    Node *node;  // NULL: not open
    uint64_t position;
    bool readable;
    bool writable;
    __wasi_fdflags_t flags;
} Handle;

static Handle handles[MAX_FDS];

static Handle *handle_of(__wasi_fd_t fd) {
    return fd >= FIRST_FD && fd < MAX_FDS && handles[fd].node != NULL ? &handles[fd] : NULL;
}

static bool is_stream(__wasi_fd_t fd) {
    return fd >= 0 && fd < STREAMS;
}

// A handle of a regular file; else the errno to answer.
static Errno file_of(__wasi_fd_t fd, Handle **handle) {
    *handle = handle_of(fd);
    if (*handle == NULL) {
        return is_stream(fd) ? __WASI_ERRNO_SPIPE : __WASI_ERRNO_BADF;
    }
    switch ((*handle)->node->type) {
        case __WASI_FILETYPE_REGULAR_FILE: return 0;
        case __WASI_FILETYPE_DIRECTORY: return __WASI_ERRNO_ISDIR;
        default: return __WASI_ERRNO_SPIPE;
    }
}

// The directory that paths given with `fd` start from.
static Errno directory_of(__wasi_fd_t fd, Node **directory) {
    if (fd == ROOT_FD) {
        *directory = vfs_root();
        return 0;
    }
    Handle *handle = handle_of(fd);
    if (handle == NULL) {
        return is_stream(fd) ? __WASI_ERRNO_NOTDIR : __WASI_ERRNO_BADF;
    }
    *directory = handle->node;
    return handle->node->type == __WASI_FILETYPE_DIRECTORY ? 0 : __WASI_ERRNO_NOTDIR;
}

static Last last_of(__wasi_lookupflags_t flags) {
    return flags & __WASI_LOOKUPFLAGS_SYMLINK_FOLLOW ? VFS_FOLLOW : VFS_LOOK;
}

static Errno find_at(__wasi_fd_t fd, const char *path, Last last, Found *found) {
    Node *directory;
    Errno failed = directory_of(fd, &directory);
    return failed ? failed : vfs_find(directory, path, last, found);
}

static Errno find_existing_at(__wasi_fd_t fd, const char *path, Last last, Found *found) {
    Node *directory;
    Errno failed = directory_of(fd, &directory);
    return failed ? failed : vfs_find_existing(directory, path, last, found);
}

// What libc calls "preopened": the directory that absolute paths are relative to.
Errno __wasi_fd_prestat_get(__wasi_fd_t fd, __wasi_prestat_t *prestat) {
    if (fd != ROOT_FD) {
        return __WASI_ERRNO_BADF;
    }
    *prestat = (__wasi_prestat_t){.tag = __WASI_PREOPENTYPE_DIR, .u.dir.pr_name_len = 1};
    return 0;
}

Errno __wasi_fd_prestat_dir_name(__wasi_fd_t fd, uint8_t *name, __wasi_size_t length) {
    if (fd != ROOT_FD || length < 1) {
        return __WASI_ERRNO_BADF;
    }
    *name = '/';
    return 0;
}

Errno __wasi_path_open(__wasi_fd_t fd, __wasi_lookupflags_t lookup, const char *path, __wasi_oflags_t flags,
                       __wasi_rights_t rights, __wasi_rights_t inheriting, __wasi_fdflags_t fd_flags,
                       __wasi_fd_t *opened) {
    Found found;
    bool creates = flags & __WASI_OFLAGS_CREAT;
    // As O_CREAT | O_EXCL has it, a symbolic link is then a name that exists.
    bool follow = (lookup & __WASI_LOOKUPFLAGS_SYMLINK_FOLLOW) && !(creates && (flags & __WASI_OFLAGS_EXCL));
    Errno failed = find_at(fd, path, follow ? VFS_FOLLOW : VFS_LOOK, &found);
    if (failed) {
        return failed;
    }
    __wasi_fd_t free_fd = FIRST_FD;
    while (free_fd < MAX_FDS && handles[free_fd].node != NULL) {
        free_fd++;
    }
    if (free_fd == MAX_FDS) {
        return __WASI_ERRNO_MFILE;
    }
    bool writable = rights & __WASI_RIGHTS_FD_WRITE;
    bool readable = rights & __WASI_RIGHTS_FD_READ;
    Node *node = found.node;
    if (node == NULL) {
        failed = creates ? vfs_make(&found, __WASI_FILETYPE_REGULAR_FILE, &node) : __WASI_ERRNO_NOENT;
        if (failed) {
            return failed;
        }
    } else if (creates && (flags & __WASI_OFLAGS_EXCL)) {
        return __WASI_ERRNO_EXIST;
    } else if (node->type == __WASI_FILETYPE_SYMBOLIC_LINK) {
        return __WASI_ERRNO_LOOP;
    } else if (node->type == __WASI_FILETYPE_DIRECTORY) {
        if (writable || creates) {
            return __WASI_ERRNO_ISDIR;
        }
    } else if (flags & __WASI_OFLAGS_DIRECTORY) {
        return __WASI_ERRNO_NOTDIR;
    } else if ((readable && !(node->mode & S_IRUSR)) || (writable && !(node->mode & S_IWUSR))) {
        return __WASI_ERRNO_ACCES;
    } else if (node->type == __WASI_FILETYPE_REGULAR_FILE) {
        if (node->is_read_only && (writable || (flags & __WASI_OFLAGS_TRUNC))) {
            return __WASI_ERRNO_ROFS;
        }
        if (flags & __WASI_OFLAGS_TRUNC) {
            failed = vfs_resize(node, 0);
            if (failed) {
                return failed;
            }
        }
    }
    vfs_hold(node);
    handles[free_fd] = (Handle){.node = node, .readable = readable, .writable = writable, .flags = fd_flags};
    *opened = free_fd;
    return 0;
}

Errno __wasi_fd_close(__wasi_fd_t fd) {
    if (is_stream(fd)) {
        return 0;
    }
    Handle *handle = handle_of(fd);
    if (handle == NULL) {
        return __WASI_ERRNO_BADF;
    }
    Node *node = handle->node;
    *handle = (Handle){0};
    vfs_release(node);
    return 0;
}

Errno __wasi_fd_renumber(__wasi_fd_t fd, __wasi_fd_t to) {
    Handle *handle = handle_of(fd);
    if (handle == NULL || handle_of(to) == NULL) {
        return __WASI_ERRNO_BADF;
    }
    if (fd != to) {
        Node *replaced = handles[to].node;
        handles[to] = *handle;
        *handle = (Handle){0};
        vfs_release(replaced);
    }
    return 0;
}

// ---- reading and writing

static Errno read_device(Device device, const __wasi_iovec_t *buffers, size_t count, __wasi_size_t *read) {
    *read = 0;
    switch (device) {
        case DEVICE_STDIN: return (Errno)host_fd_read(STDIN_FILENO, buffers, count, read);
        case DEVICE_ZERO:
        case DEVICE_RANDOM:
            for (size_t i = 0; i < count; i++) {
                if (device == DEVICE_ZERO) {
                    memset(buffers[i].buf, 0, buffers[i].buf_len);
                } else if (host_random_get(buffers[i].buf, buffers[i].buf_len) != 0) {
                    return __WASI_ERRNO_IO;
                }
                *read += buffers[i].buf_len;
            }
            return 0;
        default: return 0;
    }
}

static Errno write_device(Device device, const __wasi_ciovec_t *buffers, size_t count, __wasi_size_t *written) {
    if (device == DEVICE_STDOUT || device == DEVICE_STDERR) {
        int fd = device == DEVICE_STDOUT ? STDOUT_FILENO : STDERR_FILENO;
        return (Errno)host_fd_write(fd, buffers, count, written);
    }
    *written = 0;
    for (size_t i = 0; i < count; i++) {
        *written += buffers[i].buf_len;
    }
    return 0;
}

static __wasi_size_t read_file(const Node *node, uint64_t offset, const __wasi_iovec_t *buffers, size_t count) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        size_t got = vfs_read(node, offset + total, (char *)buffers[i].buf, buffers[i].buf_len);
        total += got;
        if (got < buffers[i].buf_len) {
            break;
        }
    }
    return total;
}

static Errno write_file(Node *node, uint64_t offset, const __wasi_ciovec_t *buffers, size_t count,
                        __wasi_size_t *written) {
    *written = 0;
    for (size_t i = 0; i < count; i++) {
        size_t done;
        Errno failed = vfs_write(node, offset + *written, (const char *)buffers[i].buf, buffers[i].buf_len, &done);
        if (failed) {
            return *written > 0 ? 0 : failed;
        }
        *written += done;
        if (done < buffers[i].buf_len) {
            break;
        }
    }
    return 0;
}

Errno __wasi_fd_read(__wasi_fd_t fd, const __wasi_iovec_t *buffers, size_t count, __wasi_size_t *read) {
    if (is_stream(fd)) {
        return (Errno)host_fd_read(fd, buffers, count, read);
    }
    Handle *handle = handle_of(fd);
    if (handle == NULL || !handle->readable) {
        return __WASI_ERRNO_BADF;
    }
    switch (handle->node->type) {
        case __WASI_FILETYPE_DIRECTORY: return __WASI_ERRNO_ISDIR;
        case __WASI_FILETYPE_CHARACTER_DEVICE: return read_device(handle->node->device, buffers, count, read);
        default:
            *read = read_file(handle->node, handle->position, buffers, count);
            handle->position += *read;
            return 0;
    }
}

Errno __wasi_fd_write(__wasi_fd_t fd, const __wasi_ciovec_t *buffers, size_t count, __wasi_size_t *written) {
    if (is_stream(fd)) {
        return (Errno)host_fd_write(fd, buffers, count, written);
    }
    Handle *handle = handle_of(fd);
    if (handle == NULL || !handle->writable) {
        return __WASI_ERRNO_BADF;
    }
    if (handle->node->type == __WASI_FILETYPE_CHARACTER_DEVICE) {
        return write_device(handle->node->device, buffers, count, written);
    }
    if (handle->flags & __WASI_FDFLAGS_APPEND) {
        handle->position = vfs_size(handle->node);
    }
    Errno failed = write_file(handle->node, handle->position, buffers, count, written);
    handle->position += *written;
    return failed;
}

Errno __wasi_fd_pread(__wasi_fd_t fd, const __wasi_iovec_t *buffers, size_t count, __wasi_filesize_t offset,
                      __wasi_size_t *read) {
    Handle *handle;
    Errno failed = file_of(fd, &handle);
    if (failed) {
        return failed;
    }
    if (!handle->readable) {
        return __WASI_ERRNO_BADF;
    }
    *read = read_file(handle->node, offset, buffers, count);
    return 0;
}

Errno __wasi_fd_pwrite(__wasi_fd_t fd, const __wasi_ciovec_t *buffers, size_t count, __wasi_filesize_t offset,
                       __wasi_size_t *written) {
    Handle *handle;
    Errno failed = file_of(fd, &handle);
    if (failed) {
        return failed;
    }
    return handle->writable ? write_file(handle->node, offset, buffers, count, written) : __WASI_ERRNO_BADF;
}

Errno __wasi_fd_seek(__wasi_fd_t fd, __wasi_filedelta_t delta, __wasi_whence_t whence, __wasi_filesize_t *position) {
    Handle *handle = handle_of(fd);
    if (handle == NULL) {
        return is_stream(fd) ? __WASI_ERRNO_SPIPE : __WASI_ERRNO_BADF;
    }
    if (handle->node->type == __WASI_FILETYPE_CHARACTER_DEVICE) {
        if (handle->node->device >= DEVICE_STDIN) {
            return __WASI_ERRNO_SPIPE;
        }
        *position = 0;
        return 0;
    }
    uint64_t base;
    switch (whence) {
        case __WASI_WHENCE_SET: base = 0; break;
        case __WASI_WHENCE_CUR: base = handle->position; break;
        case __WASI_WHENCE_END: base = vfs_size(handle->node); break;
        default: return __WASI_ERRNO_INVAL;
    }
    int64_t target;
    if (__builtin_add_overflow((int64_t)base, delta, &target) || target < 0) {
        return __WASI_ERRNO_INVAL;
    }
    handle->position = (uint64_t)target;
    *position = handle->position;
    return 0;
}

Errno __wasi_fd_tell(__wasi_fd_t fd, __wasi_filesize_t *position) {
    return __wasi_fd_seek(fd, 0, __WASI_WHENCE_CUR, position);
}

Errno __wasi_fd_allocate(__wasi_fd_t fd, __wasi_filesize_t offset, __wasi_filesize_t length) {
    Handle *handle;
    Errno failed = file_of(fd, &handle);
    if (failed) {
        return failed;
    }
    if (!handle->writable) {
        return __WASI_ERRNO_BADF;
    }
    uint64_t end;
    if (__builtin_add_overflow(offset, length, &end)) {
        return __WASI_ERRNO_FBIG;
    }
    return end <= vfs_size(handle->node) ? 0 : vfs_resize(handle->node, end);
}

Errno __wasi_fd_filestat_set_size(__wasi_fd_t fd, __wasi_filesize_t size) {
    Handle *handle;
    Errno failed = file_of(fd, &handle);
    if (failed) {
        return failed;
    }
    return handle->writable ? vfs_resize(handle->node, size) : __WASI_ERRNO_INVAL;
}

static Errno check_open(__wasi_fd_t fd) {
    return is_stream(fd) || handle_of(fd) != NULL ? 0 : __WASI_ERRNO_BADF;
}

Errno __wasi_fd_advise(__wasi_fd_t fd, __wasi_filesize_t offset, __wasi_filesize_t length, __wasi_advice_t advice) {
    return check_open(fd);
}

Errno __wasi_fd_datasync(__wasi_fd_t fd) {
    return check_open(fd);
}

Errno __wasi_fd_sync(__wasi_fd_t fd) {
    return check_open(fd);
}

// ---- properties

Errno __wasi_fd_fdstat_get(__wasi_fd_t fd, __wasi_fdstat_t *stat) {
    // Every right: what a descriptor may do is decided call by call. With the right to seek, libc takes no device for a
    // terminal, and a stream of unknown type for none either.
    const __wasi_rights_t all = (__wasi_rights_t)-1;
    *stat = (__wasi_fdstat_t){.fs_rights_base = all, .fs_rights_inheriting = all};
    if (fd == ROOT_FD) {
        stat->fs_filetype = __WASI_FILETYPE_DIRECTORY;
        return 0;
    }
    Handle *handle = handle_of(fd);
    if (handle == NULL) {
        return is_stream(fd) ? 0 : __WASI_ERRNO_BADF;
    }
    stat->fs_filetype = handle->node->type;
    stat->fs_flags = handle->flags;
    if (!handle->readable) {
        stat->fs_rights_base &= ~__WASI_RIGHTS_FD_READ;
    }
    if (!handle->writable) {
        stat->fs_rights_base &= ~__WASI_RIGHTS_FD_WRITE;
    }
    return 0;
}

Errno __wasi_fd_fdstat_set_flags(__wasi_fd_t fd, __wasi_fdflags_t flags) {
    Handle *handle = handle_of(fd);
    if (handle == NULL) {
        return check_open(fd);
    }
    handle->flags = flags;
    return 0;
}

Errno __wasi_fd_fdstat_set_rights(__wasi_fd_t fd, __wasi_rights_t rights, __wasi_rights_t inheriting) {
    return __WASI_ERRNO_NOTSUP;
}

static uint64_t link_count(const Node *node) {
    return node->links + (node->type == __WASI_FILETYPE_DIRECTORY && node->links > 0);
}

static __wasi_filestat_t filestat_of(const Node *node) {
    return (__wasi_filestat_t){
        .dev = 1,
        .ino = node->id,
        .filetype = node->type,
        .nlink = link_count(node),
        .size = vfs_size(node),
        .atim = node->modified,
        .mtim = node->modified,
        .ctim = node->changed,
    };
}

Errno __wasi_fd_filestat_get(__wasi_fd_t fd, __wasi_filestat_t *stat) {
    Handle *handle = handle_of(fd);
    if (handle == NULL) {
        *stat = (__wasi_filestat_t){0};
        return is_stream(fd) ? 0 : __WASI_ERRNO_BADF;
    }
    *stat = filestat_of(handle->node);
    return 0;
}

Errno __wasi_path_filestat_get(__wasi_fd_t fd, __wasi_lookupflags_t flags, const char *path, __wasi_filestat_t *stat) {
    Found found;
    Errno failed = find_existing_at(fd, path, last_of(flags), &found);
    if (!failed) {
        *stat = filestat_of(found.node);
    }
    return failed;
}

static Errno set_times(Node *node, __wasi_timestamp_t modified, __wasi_fstflags_t flags) {
    if (node->is_read_only) {
        return __WASI_ERRNO_ROFS;
    }
    node->changed = vfs_now();
    if (flags & __WASI_FSTFLAGS_MTIM) {
        node->modified = modified;
    } else if (flags & __WASI_FSTFLAGS_MTIM_NOW) {
        node->modified = node->changed;
    }
    return 0;
}

Errno __wasi_fd_filestat_set_times(__wasi_fd_t fd, __wasi_timestamp_t accessed, __wasi_timestamp_t modified,
                                   __wasi_fstflags_t flags) {
    Handle *handle = handle_of(fd);
    return handle == NULL ? check_open(fd) : set_times(handle->node, modified, flags);
}

Errno __wasi_path_filestat_set_times(__wasi_fd_t fd, __wasi_lookupflags_t lookup, const char *path,
                                     __wasi_timestamp_t accessed, __wasi_timestamp_t modified, __wasi_fstflags_t flags) {
    Found found;
    Errno failed = find_existing_at(fd, path, last_of(lookup), &found);
    return failed ? failed : set_times(found.node, modified, flags);
}

// ---- the tree

Errno __wasi_fd_readdir(__wasi_fd_t fd, uint8_t *buffer, __wasi_size_t size, __wasi_dircookie_t cookie,
                        __wasi_size_t *used) {
    Node *directory;
    Errno failed = directory_of(fd, &directory);
    if (failed) {
        return failed;
    }
    const Node *parent = directory->directory.parent;
    const Entry *entry = directory->directory.first;
    *used = 0;
    while (*used < size) {
        const Node *node;
        const char *name;
        __wasi_dirent_t head = {0};
        if (cookie < 2) {
            cookie++;
            node = cookie == 1 || parent == NULL ? directory : parent;
            name = "..";
            head.d_namlen = (uint32_t)cookie;
        } else {
            while (entry != NULL && entry->cookie <= cookie) {
                entry = entry->next;
            }
            if (entry == NULL) {
                return 0;
            }
            cookie = entry->cookie;
            node = entry->node;
            name = entry->name;
            head.d_namlen = entry->length;
        }
        head.d_next = cookie;
        head.d_ino = node->id;
        head.d_type = node->type;
        // An entry that does not fit is cut: the full buffer tells libc to come again.
        size_t count = size - *used < sizeof head ? size - *used : sizeof head;
        memcpy(buffer + *used, &head, count);
        *used += count;
        count = size - *used < head.d_namlen ? size - *used : head.d_namlen;
        memcpy(buffer + *used, name, count);
        *used += count;
    }
    return 0;
}

Errno __wasi_path_create_directory(__wasi_fd_t fd, const char *path) {
    Found found;
    Errno failed = find_at(fd, path, VFS_NAME, &found);
    return failed ? failed : vfs_make(&found, __WASI_FILETYPE_DIRECTORY, NULL);
}

Errno __wasi_path_remove_directory(__wasi_fd_t fd, const char *path) {
    Found found;
    Errno failed = find_existing_at(fd, path, VFS_NAME, &found);
    return failed ? failed : vfs_remove(&found, true);
}

Errno __wasi_path_unlink_file(__wasi_fd_t fd, const char *path) {
    Found found;
    Errno failed = find_existing_at(fd, path, VFS_NAME, &found);
    return failed ? failed : vfs_remove(&found, false);
}

Errno __wasi_path_rename(__wasi_fd_t fd, const char *path, __wasi_fd_t new_fd, const char *new_path) {
    Found from;
    Found to;
    Errno failed = find_existing_at(fd, path, VFS_NAME, &from);
    if (!failed) {
        failed = find_at(new_fd, new_path, VFS_NAME, &to);
    }
    return failed ? failed : vfs_rename(&from, &to);
}

Errno __wasi_path_link(__wasi_fd_t fd, __wasi_lookupflags_t flags, const char *path, __wasi_fd_t new_fd,
                       const char *new_path) {
    Found from;
    Found to;
    Errno failed = find_existing_at(fd, path, last_of(flags), &from);
    if (!failed) {
        failed = find_at(new_fd, new_path, VFS_NAME, &to);
    }
    return failed ? failed : vfs_add_name(&to, from.node);
}

Errno __wasi_path_symlink(const char *target, __wasi_fd_t fd, const char *path) {
    Found found;
    Errno failed = find_at(fd, path, VFS_NAME, &found);
    return failed ? failed : vfs_make_link(&found, target);
}

Errno __wasi_path_readlink(__wasi_fd_t fd, const char *path, uint8_t *buffer, __wasi_size_t size, __wasi_size_t *used) {
    Found found;
    Errno failed = find_existing_at(fd, path, VFS_LOOK, &found);
    if (failed) {
        return failed;
    }
    if (found.node->type != __WASI_FILETYPE_SYMBOLIC_LINK) {
        return __WASI_ERRNO_INVAL;
    }
    *used = size < found.node->link.length ? size : found.node->link.length;
    memcpy(buffer, found.node->link.target, *used);
    return 0;
}

// ---- libc's own functions, where WASI has no word for what they mean

static int answer(Errno failed) {
    if (failed) {
        errno = failed;
        return -1;
    }
    return 0;
}

static struct timespec timespec_of(uint64_t nanoseconds) {
    return (struct timespec){
        .tv_sec = (time_t)(nanoseconds / 1000000000), .tv_nsec = (long)(nanoseconds % 1000000000),
    };
}

static mode_t type_bits(const Node *node) {
    switch (node->type) {
        case __WASI_FILETYPE_DIRECTORY: return S_IFDIR;
        case __WASI_FILETYPE_SYMBOLIC_LINK: return S_IFLNK;
        case __WASI_FILETYPE_CHARACTER_DEVICE: return S_IFCHR;
        default: return S_IFREG;
    }
}

static struct stat stat_of(const Node *node) {
    return (struct stat){
        .st_dev = 1,
        .st_ino = node->id,
        .st_nlink = link_count(node),
        .st_mode = type_bits(node) | node->mode,
        .st_size = (off_t)vfs_size(node),
        .st_blksize = 4096,
        .st_blocks = (blkcnt_t)((vfs_size(node) + 511) / 512),
        .st_atim = timespec_of(node->modified),
        .st_mtim = timespec_of(node->modified),
        .st_ctim = timespec_of(node->changed),
    };
}

int fstat(int fd, struct stat *stat) {
    if (is_stream(fd)) {
        *stat = (struct stat){.st_dev = 1, .st_nlink = 1, .st_mode = S_IFIFO | S_IRUSR | S_IWUSR};
        return 0;
    }
    Handle *handle = handle_of(fd);
    if (handle == NULL) {
        return answer(__WASI_ERRNO_BADF);
    }
    *stat = stat_of(handle->node);
    return 0;
}

int __wasilibc_nocwd_fstatat(int fd, const char *restrict path, struct stat *restrict stat, int flags) {
    Found found;
    Errno failed = find_existing_at(fd, path, flags & AT_SYMLINK_NOFOLLOW ? VFS_LOOK : VFS_FOLLOW, &found);
    if (!failed) {
        *stat = stat_of(found.node);
    }
    return answer(failed);
}

int __wasilibc_nocwd_faccessat(int fd, const char *path, int wanted, int flags) {
    Found found;
    Errno failed = find_existing_at(fd, path, VFS_FOLLOW, &found);
    if (failed) {
        return answer(failed);
    }
    const Node *node = found.node;
    if ((wanted & W_OK) && node->is_read_only && node->type != __WASI_FILETYPE_CHARACTER_DEVICE) {
        return answer(__WASI_ERRNO_ROFS);
    }
    bool denied = ((wanted & R_OK) && !(node->mode & S_IRUSR)) || ((wanted & W_OK) && !(node->mode & S_IWUSR)) ||
                  ((wanted & X_OK) && !(node->mode & S_IXUSR));
    return answer(denied ? __WASI_ERRNO_ACCES : 0);
}

static int set_mode(Node *node, mode_t mode) {
    if (node->is_read_only) {
        return answer(__WASI_ERRNO_ROFS);
    }
    node->mode = mode & 07777;
    node->changed = vfs_now();
    return 0;
}

// libc has stubs of these in objects that are needed otherwise, so the linker is told to take ours (`--wrap`).
int __wrap_fchmod(int fd, mode_t mode) {
    Handle *handle = handle_of(fd);
    return handle == NULL ? answer(check_open(fd)) : set_mode(handle->node, mode);
}

static Errno find_from_cwd(const char *path, Found *found) {
    char cwd[VFS_MAX_PATH];
    *found = (Found){.node = vfs_root()};
    if (*path != '/') {
        if (getcwd(cwd, sizeof cwd) == NULL) {
            return (Errno)errno;
        }
        Errno failed = vfs_find_existing(vfs_root(), cwd, VFS_FOLLOW, found);
        if (failed) {
            return failed;
        }
    }
    return vfs_find_existing(found->node, path, VFS_FOLLOW, found);
}

int __wrap_chmod(const char *path, mode_t mode) {
    Found found;
    Errno failed = find_from_cwd(path, &found);
    return failed ? answer(failed) : set_mode(found.node, mode);
}

// libc resolves every path with this function, and takes an empty one for the working directory.
int __real___wasilibc_find_relpath_alloc(const char *path, const char **prefix, char **relative, size_t *length,
                                         int can_grow);

int __wrap___wasilibc_find_relpath_alloc(const char *path, const char **prefix, char **relative, size_t *length,
                                         int can_grow) {
    if (*path == '\0') {
        return answer(__WASI_ERRNO_NOENT);
    }
    return __real___wasilibc_find_relpath_alloc(path, prefix, relative, length, can_grow);
}

int __real_chdir(const char *path);

// libc would append `..` and links to the path that `getcwd` returns.
int __wrap_chdir(const char *path) {
    char canonical[VFS_MAX_PATH];
    Found found;
    Errno failed = find_from_cwd(path, &found);
    if (!failed) {
        failed = found.node->type == __WASI_FILETYPE_DIRECTORY ? vfs_path_of(found.node, canonical)
                                                                : __WASI_ERRNO_NOTDIR;
    }
    return failed ? answer(failed) : __real_chdir(canonical);
}
