// The guest's private file system: a tree of nodes in the guest's own memory.
//
// Nothing of it is outside linear memory, so a snapshot, a fork and a reset of an instance carry its files by themselves,
// and the host has no file to guard. vfs.c knows the tree; posix.c turns it into file descriptors and WASI calls.

#ifndef VFS_H
#define VFS_H

#include <stdint.h>
#include <stddef.h>
#include <wasi/api.h>

typedef __wasi_errno_t Errno;
typedef struct Node Node;
typedef struct Entry Entry;

enum {
    VFS_CAPACITY = 64 << 20,   // bytes, names and bookkeeping included
    VFS_MAX_NODES = 16 << 10,  // files, directories and links
    VFS_MAX_NAME = 255,
    VFS_MAX_PATH = 4096,
    VFS_MAX_LINKS_FOLLOWED = 40,
};

// What a file of type CHARACTER_DEVICE does.
typedef enum { DEVICE_NULL, DEVICE_ZERO, DEVICE_RANDOM, DEVICE_STDIN, DEVICE_STDOUT, DEVICE_STDERR } Device;

// One name in a directory. Names are kept in the order of their cookies, so a listing survives changes.
struct Entry {
    Entry *next;
    uint64_t cookie;
    Node *node;
    uint32_t hash;
    uint32_t length;
    char name[];
};

struct Node {
    uint64_t id;
    uint64_t modified;  // nanoseconds since 1970; there is no record of reading
    uint64_t changed;
    uint32_t links;     // names it has
    uint32_t handles;   // file descriptors it has; a node without either is freed
    uint16_t mode;      // permission bits
    uint8_t type;       // __WASI_FILETYPE_…
    bool is_read_only;  // part of the guest itself
    union {
        struct {
            Entry *first;
            Entry *last;
            Node *parent;  // NULL once removed
            uint64_t next_cookie;
        } directory;
        struct {
            uint32_t size;
            uint32_t chunk_count;
            char **chunks;      // a NULL is a hole
            const char *fixed;  // the bytes of a file that is linked in, instead of chunks
        } file;
        struct {
            uint32_t length;
            char *target;
        } link;
        Device device;
    };
};

// Where a path leads. `node` is NULL for a name that does not exist in an existing directory. `length` is 0 when the path
// ends in no name (`/`, `.`, `..`); such a path can be looked at, but not made or removed.
typedef struct {
    Node *parent;
    const char *name;
    size_t length;
    Node *node;
    bool wants_directory;  // it ends in a slash
} Found;

// What to do with a symbolic link at the end of a path.
typedef enum {
    VFS_FOLLOW,  // go where it leads
    VFS_LOOK,    // take the link itself, unless the path ends in a slash
    VFS_NAME,    // take the link itself: it is to be made, moved or removed
} Last;

void vfs_init(void);
Node *vfs_root(void);
uint64_t vfs_now(void);

Errno vfs_find(Node *start, const char *path, Last last, Found *found);
// As vfs_find, but a missing name is ENOENT.
Errno vfs_find_existing(Node *start, const char *path, Last last, Found *found);

Errno vfs_make(const Found *found, uint8_t type, Node **made);
Errno vfs_make_link(const Found *found, const char *target);
Errno vfs_add_name(const Found *found, Node *node);
Errno vfs_remove(const Found *found, bool directory);
Errno vfs_rename(const Found *from, const Found *to);

// Makes everything below `path` part of the guest itself: read-only, and free of charge.
Errno vfs_seal(const char *path);

// Writes the absolute path of a directory into `path`, which has VFS_MAX_PATH bytes.
Errno vfs_path_of(const Node *directory, char *path);

void vfs_hold(Node *node);
void vfs_release(Node *node);

uint64_t vfs_size(const Node *node);
Errno vfs_resize(Node *node, uint64_t size);
size_t vfs_read(const Node *node, uint64_t offset, char *bytes, size_t length);
// Writes as much as fits; an error only if that is nothing.
Errno vfs_write(Node *node, uint64_t offset, const char *bytes, size_t length, size_t *written);

#endif
