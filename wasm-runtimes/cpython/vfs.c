// The tree of the guest's file system (vfs.h).

#include "vfs.h"

#include <stdlib.h>
#include <string.h>

enum {
    CHUNK = 4096,
    // No file is larger than the whole file system, so that offsets into one fit 32 bits.
    MAX_FILE = VFS_CAPACITY,
    MODE_DIRECTORY = 0755,
    MODE_FILE = 0644,
    MODE_LINK = 0777,
    MODE_DEVICE = 0666,
};

static Node *root;
static uint64_t last_id;
static uint32_t node_count;
static uint32_t bytes_used;

// Time zones, from Debian's tzdata: NUL-terminated name, then offset and length into the data, little-endian.
static const unsigned char zone_index[] = {
#embed "zoneinfo.index"
};

static const unsigned char zone_data[] = {
#embed "zoneinfo.data"
};

// ---- memory, charged to the file system

static void *take(size_t size) {
    if (size > VFS_CAPACITY - bytes_used) {
        return NULL;
    }
    void *memory = malloc(size);
    if (memory != NULL) {
        bytes_used += size;
    }
    return memory;
}

static void give_back(void *memory, size_t size) {
    if (memory != NULL) {
        free(memory);
        // What was there when the file system was sealed is not charged.
        bytes_used -= size < bytes_used ? size : bytes_used;
    }
}

// ---- nodes

uint64_t vfs_now(void) {
    __wasi_timestamp_t now = 0;
    if (__wasi_clock_time_get(__WASI_CLOCKID_REALTIME, 0, &now) != 0) {
        return 0;
    }
    return now;
}

Node *vfs_root(void) {
    return root;
}

static Node *new_node(uint8_t type) {
    if (node_count >= VFS_MAX_NODES) {
        return NULL;
    }
    Node *node = take(sizeof *node);
    if (node == NULL) {
        return NULL;
    }
    node_count++;
    memset(node, 0, sizeof *node);
    node->id = ++last_id;
    node->type = type;
    node->modified = node->changed = vfs_now();
    switch (type) {
        case __WASI_FILETYPE_DIRECTORY:
            node->mode = MODE_DIRECTORY;
            node->directory.next_cookie = 3;  // 1 and 2 are `.` and `..`
            break;
        case __WASI_FILETYPE_REGULAR_FILE: node->mode = MODE_FILE; break;
        case __WASI_FILETYPE_SYMBOLIC_LINK: node->mode = MODE_LINK; break;
        default: node->mode = MODE_DEVICE; break;
    }
    return node;
}

static void drop_chunks(Node *node, uint32_t first) {
    for (uint32_t i = first; i < node->file.chunk_count; i++) {
        give_back(node->file.chunks[i], CHUNK);
        node->file.chunks[i] = NULL;
    }
}

static void free_if_unused(Node *node) {
    if (node->links > 0 || node->handles > 0) {
        return;
    }
    if (node->type == __WASI_FILETYPE_REGULAR_FILE) {
        drop_chunks(node, 0);
        give_back(node->file.chunks, node->file.chunk_count * sizeof *node->file.chunks);
    } else if (node->type == __WASI_FILETYPE_SYMBOLIC_LINK) {
        give_back(node->link.target, node->link.length + 1);
    }
    node_count -= node_count > 0;
    give_back(node, sizeof *node);
}

void vfs_hold(Node *node) {
    node->handles++;
}

void vfs_release(Node *node) {
    node->handles--;
    free_if_unused(node);
}

// ---- directories

static uint32_t hash_of(const char *name, size_t length) {
    uint32_t hash = 2166136261;  // FNV-1a
    for (size_t i = 0; i < length; i++) {
        hash = (hash ^ (unsigned char)name[i]) * 16777619;
    }
    return hash;
}

// The entry called `name`, and in `*before` the one before it.
static Entry *lookup(const Node *directory, const char *name, size_t length, Entry **before) {
    uint32_t hash = hash_of(name, length);
    Entry *previous = NULL;
    for (Entry *entry = directory->directory.first; entry != NULL; previous = entry, entry = entry->next) {
        if (entry->hash == hash && entry->length == length && memcmp(entry->name, name, length) == 0) {
            if (before != NULL) {
                *before = previous;
            }
            return entry;
        }
    }
    return NULL;
}

static void touch(Node *node) {
    node->modified = node->changed = vfs_now();
}

static Errno add_entry(Node *directory, const char *name, size_t length, Node *node) {
    Entry *entry = take(sizeof *entry + length);
    if (entry == NULL) {
        return __WASI_ERRNO_NOSPC;
    }
    *entry = (Entry){
        .cookie = directory->directory.next_cookie++,
        .node = node,
        .hash = hash_of(name, length),
        .length = (uint32_t)length,
    };
    memcpy(entry->name, name, length);
    if (directory->directory.last == NULL) {
        directory->directory.first = entry;
    } else {
        directory->directory.last->next = entry;
    }
    directory->directory.last = entry;
    node->links++;
    if (node->type == __WASI_FILETYPE_DIRECTORY) {
        node->directory.parent = directory;
    }
    touch(directory);
    return 0;
}

// Takes an entry out of its directory. The node stays; whether it is still wanted is for the caller to say.
static Node *cut_entry(Node *directory, const char *name, size_t length) {
    Entry *before = NULL;
    Entry *entry = lookup(directory, name, length, &before);
    if (entry == NULL) {
        return NULL;
    }
    if (before == NULL) {
        directory->directory.first = entry->next;
    } else {
        before->next = entry->next;
    }
    if (directory->directory.last == entry) {
        directory->directory.last = before;
    }
    Node *node = entry->node;
    give_back(entry, sizeof *entry + length);
    node->links--;
    node->changed = vfs_now();
    touch(directory);
    return node;
}

// ---- paths

static Errno walk(Node *directory, const char *path, Last last, int *links_left, Found *found);

// Continues a walk at a symbolic link's target.
static Errno walk_link(Node *directory, const Node *link, int *links_left, Found *found) {
    if ((*links_left)-- == 0) {
        return __WASI_ERRNO_LOOP;
    }
    return walk(directory, link->link.target, VFS_FOLLOW, links_left, found);
}

static Errno walk(Node *directory, const char *path, Last last, int *links_left, Found *found) {
    if (*path == '\0') {
        return __WASI_ERRNO_NOENT;
    }
    if (*path == '/') {
        directory = root;
    }
    *found = (Found){.node = directory};
    for (;;) {
        while (*path == '/') {
            path++;
        }
        if (*path == '\0') {
            return 0;  // `/`, or a path that ended in `.` or `..`
        }
        const char *name = path;
        while (*path != '/' && *path != '\0') {
            path++;
        }
        size_t length = (size_t)(path - name);
        const char *rest = path;
        while (*rest == '/') {
            rest++;
        }
        bool is_last = *rest == '\0';
        bool has_slash = *path == '/';

        if (directory->type != __WASI_FILETYPE_DIRECTORY) {
            return __WASI_ERRNO_NOTDIR;
        }
        if (length > VFS_MAX_NAME) {
            return __WASI_ERRNO_NAMETOOLONG;
        }
        if (length == 1 && name[0] == '.') {
            *found = (Found){.node = directory};
            continue;
        }
        if (length == 2 && name[0] == '.' && name[1] == '.') {
            directory = directory->directory.parent;
            if (directory == NULL) {
                return __WASI_ERRNO_NOENT;
            }
            *found = (Found){.node = directory};
            continue;
        }
        Entry *entry = lookup(directory, name, length, NULL);
        Node *node = entry == NULL ? NULL : entry->node;
        bool follows = !is_last || last == VFS_FOLLOW || (last == VFS_LOOK && has_slash);
        if (node != NULL && node->type == __WASI_FILETYPE_SYMBOLIC_LINK && follows) {
            Errno failed = walk_link(directory, node, links_left, found);
            if (failed) {
                return failed;
            }
            found->wants_directory |= has_slash;
        } else {
            *found = (Found){
                .parent = directory, .name = name, .length = length, .node = node, .wants_directory = has_slash,
            };
        }
        if (found->node != NULL && found->wants_directory && found->node->type != __WASI_FILETYPE_DIRECTORY) {
            return __WASI_ERRNO_NOTDIR;
        }
        if (is_last) {
            return 0;
        }
        if (found->node == NULL) {
            return __WASI_ERRNO_NOENT;
        }
        directory = found->node;
    }
}

Errno vfs_find(Node *start, const char *path, Last last, Found *found) {
    if (strlen(path) >= VFS_MAX_PATH) {
        return __WASI_ERRNO_NAMETOOLONG;
    }
    int links_left = VFS_MAX_LINKS_FOLLOWED;
    return walk(start, path, last, &links_left, found);
}

Errno vfs_find_existing(Node *start, const char *path, Last last, Found *found) {
    Errno failed = vfs_find(start, path, last, found);
    if (failed) {
        return failed;
    }
    return found->node == NULL ? __WASI_ERRNO_NOENT : 0;
}

Errno vfs_path_of(const Node *directory, char *path) {
    // From the end of the buffer towards its start, since the way leads upwards.
    size_t at = VFS_MAX_PATH - 1;
    path[at] = '\0';
    while (directory != root) {
        const Node *parent = directory->directory.parent;
        if (parent == NULL) {
            return __WASI_ERRNO_NOENT;
        }
        const Entry *entry = parent->directory.first;
        while (entry->node != directory) {
            entry = entry->next;
        }
        if (entry->length + 1 > at) {
            return __WASI_ERRNO_NAMETOOLONG;
        }
        at -= entry->length;
        memcpy(path + at, entry->name, entry->length);
        path[--at] = '/';
        directory = parent;
    }
    if (path[at] == '\0') {
        path[--at] = '/';
    }
    memmove(path, path + at, VFS_MAX_PATH - at);
    return 0;
}

// ---- changes to the tree

// Whether a name can be added where `found` says.
static Errno check_new(const Found *found) {
    if (found->node != NULL) {
        return __WASI_ERRNO_EXIST;
    }
    if (found->parent->is_read_only) {
        return __WASI_ERRNO_ROFS;
    }
    // The directory was removed while it was open.
    return found->parent->directory.parent == NULL ? __WASI_ERRNO_NOENT : 0;
}

static Errno add_new(const Found *found, Node *node) {
    Errno failed = add_entry(found->parent, found->name, found->length, node);
    if (failed) {
        free_if_unused(node);
    }
    return failed;
}

Errno vfs_make(const Found *found, uint8_t type, Node **made) {
    Errno failed = check_new(found);
    if (failed) {
        return failed;
    }
    if (found->wants_directory && type != __WASI_FILETYPE_DIRECTORY) {
        return __WASI_ERRNO_ISDIR;
    }
    Node *node = new_node(type);
    if (node == NULL) {
        return __WASI_ERRNO_NOSPC;
    }
    failed = add_new(found, node);
    if (!failed && made != NULL) {
        *made = node;
    }
    return failed;
}

Errno vfs_make_link(const Found *found, const char *target) {
    Errno failed = check_new(found);
    if (failed) {
        return failed;
    }
    size_t length = strlen(target);
    if (length == 0 || length >= VFS_MAX_PATH || found->wants_directory) {
        return length >= VFS_MAX_PATH ? __WASI_ERRNO_NAMETOOLONG : __WASI_ERRNO_NOENT;
    }
    Node *node = new_node(__WASI_FILETYPE_SYMBOLIC_LINK);
    if (node == NULL) {
        return __WASI_ERRNO_NOSPC;
    }
    node->link.length = (uint32_t)length;
    node->link.target = take(length + 1);
    if (node->link.target == NULL) {
        free_if_unused(node);
        return __WASI_ERRNO_NOSPC;
    }
    memcpy(node->link.target, target, length + 1);
    return add_new(found, node);
}

Errno vfs_add_name(const Found *found, Node *node) {
    Errno failed = check_new(found);
    if (failed) {
        return failed;
    }
    if (node->type == __WASI_FILETYPE_DIRECTORY) {
        return __WASI_ERRNO_PERM;
    }
    if (found->wants_directory) {
        return __WASI_ERRNO_NOENT;
    }
    // A name elsewhere would let a part of the guest outlive its read-only directory.
    if (node->is_read_only) {
        return __WASI_ERRNO_XDEV;
    }
    failed = add_entry(found->parent, found->name, found->length, node);
    if (!failed) {
        node->changed = vfs_now();
    }
    return failed;
}

// Whether the existing `found` may be removed as a directory or as something else.
static Errno check_removable(const Found *found, bool directory) {
    if (found->length == 0) {
        return __WASI_ERRNO_BUSY;
    }
    bool is_directory = found->node->type == __WASI_FILETYPE_DIRECTORY;
    if (is_directory != directory) {
        return is_directory ? __WASI_ERRNO_ISDIR : __WASI_ERRNO_NOTDIR;
    }
    if (found->parent->is_read_only || found->node->is_read_only) {
        return __WASI_ERRNO_ROFS;
    }
    return is_directory && found->node->directory.first != NULL ? __WASI_ERRNO_NOTEMPTY : 0;
}

static void remove_checked(const Found *found) {
    Node *node = cut_entry(found->parent, found->name, found->length);
    if (node->type == __WASI_FILETYPE_DIRECTORY) {
        node->directory.parent = NULL;
    }
    free_if_unused(node);
}

Errno vfs_remove(const Found *found, bool directory) {
    Errno failed = check_removable(found, directory);
    if (!failed) {
        remove_checked(found);
    }
    return failed;
}

Errno vfs_rename(const Found *from, const Found *to) {
    if (from->length == 0 || (to->node != NULL && to->length == 0)) {
        return __WASI_ERRNO_BUSY;
    }
    if (from->node == to->node) {
        return 0;
    }
    Node *node = from->node;
    bool is_directory = node->type == __WASI_FILETYPE_DIRECTORY;
    if (from->parent->is_read_only || node->is_read_only) {
        return __WASI_ERRNO_ROFS;
    }
    if (to->wants_directory && !is_directory) {
        return __WASI_ERRNO_NOTDIR;
    }
    if (is_directory) {
        // A directory below itself would be a tree that nobody can reach.
        for (const Node *above = to->parent; above != NULL && above != root; above = above->directory.parent) {
            if (above == node) {
                return __WASI_ERRNO_INVAL;
            }
        }
    }
    Errno failed = to->node == NULL ? check_new(to) : check_removable(to, is_directory);
    if (failed) {
        return failed;
    }
    // First the new name, which may fail for want of memory; names may lie in a link's target, hence the copies that
    // add_entry makes come before anything is removed.
    if (to->node != NULL) {
        Entry *entry = lookup(to->parent, to->name, to->length, NULL);
        Node *replaced = entry->node;
        entry->node = node;
        node->links++;
        cut_entry(from->parent, from->name, from->length);
        if (is_directory) {
            node->directory.parent = to->parent;
            replaced->directory.parent = NULL;
        }
        replaced->links--;
        touch(to->parent);
        free_if_unused(replaced);
        return 0;
    }
    failed = add_entry(to->parent, to->name, to->length, node);
    if (!failed) {
        cut_entry(from->parent, from->name, from->length);
    }
    return failed;
}

// ---- contents

uint64_t vfs_size(const Node *node) {
    switch (node->type) {
        case __WASI_FILETYPE_REGULAR_FILE: return node->file.size;
        case __WASI_FILETYPE_SYMBOLIC_LINK: return node->link.length;
        case __WASI_FILETYPE_DIRECTORY: return CHUNK;
        default: return 0;
    }
}

size_t vfs_read(const Node *node, uint64_t offset, char *bytes, size_t length) {
    if (offset >= node->file.size) {
        return 0;
    }
    size_t start = (size_t)offset;
    if (length > node->file.size - start) {
        length = node->file.size - start;
    }
    if (node->file.fixed != NULL) {
        memcpy(bytes, node->file.fixed + start, length);
        return length;
    }
    for (size_t done = 0; done < length;) {
        size_t at = start + done;
        size_t count = CHUNK - at % CHUNK;
        if (count > length - done) {
            count = length - done;
        }
        const char *chunk = at / CHUNK < node->file.chunk_count ? node->file.chunks[at / CHUNK] : NULL;
        if (chunk == NULL) {
            memset(bytes + done, 0, count);
        } else {
            memcpy(bytes + done, chunk + at % CHUNK, count);
        }
        done += count;
    }
    return length;
}

// The chunk number `index`, made if it was a hole.
static char *chunk_for_writing(Node *node, uint32_t index) {
    if (index >= node->file.chunk_count) {
        uint32_t count = node->file.chunk_count * 2 < 8 ? 8 : node->file.chunk_count * 2;
        if (count <= index) {
            count = index + 1;
        }
        char **chunks = take(count * sizeof *chunks);
        if (chunks == NULL) {
            return NULL;
        }
        memset(chunks, 0, count * sizeof *chunks);
        if (node->file.chunk_count > 0) {
            memcpy(chunks, node->file.chunks, node->file.chunk_count * sizeof *chunks);
        }
        give_back(node->file.chunks, node->file.chunk_count * sizeof *chunks);
        node->file.chunks = chunks;
        node->file.chunk_count = count;
    }
    if (node->file.chunks[index] == NULL) {
        node->file.chunks[index] = take(CHUNK);
        if (node->file.chunks[index] != NULL) {
            memset(node->file.chunks[index], 0, CHUNK);
        }
    }
    return node->file.chunks[index];
}

Errno vfs_write(Node *node, uint64_t offset, const char *bytes, size_t length, size_t *written) {
    *written = 0;
    if (length == 0) {
        return 0;
    }
    if (offset >= MAX_FILE) {
        return __WASI_ERRNO_FBIG;
    }
    size_t start = (size_t)offset;
    size_t done = 0;
    if (length > MAX_FILE - start) {
        length = MAX_FILE - start;
    }
    while (done < length) {
        size_t at = start + done;
        size_t count = CHUNK - at % CHUNK;
        if (count > length - done) {
            count = length - done;
        }
        char *chunk = chunk_for_writing(node, (uint32_t)(at / CHUNK));
        if (chunk == NULL) {
            break;
        }
        memcpy(chunk + at % CHUNK, bytes + done, count);
        done += count;
    }
    if (done == 0) {
        return __WASI_ERRNO_NOSPC;
    }
    if (start + done > node->file.size) {
        node->file.size = (uint32_t)(start + done);
    }
    touch(node);
    *written = done;
    return 0;
}

Errno vfs_resize(Node *node, uint64_t size) {
    if (size > MAX_FILE) {
        return __WASI_ERRNO_FBIG;
    }
    if (size < node->file.size) {
        uint32_t kept = (uint32_t)((size + CHUNK - 1) / CHUNK);
        drop_chunks(node, kept);
        // What lies behind the end must read as zeros should the file grow again.
        if (size % CHUNK != 0 && kept <= node->file.chunk_count && node->file.chunks[kept - 1] != NULL) {
            memset(node->file.chunks[kept - 1] + size % CHUNK, 0, CHUNK - size % CHUNK);
        }
    }
    node->file.size = (uint32_t)size;
    touch(node);
    return 0;
}

// ---- what is there at the start

static Node *must_make(const char *path, uint8_t type) {
    Found found;
    Node *node = NULL;
    if (vfs_find(root, path, VFS_FOLLOW, &found) != 0 || vfs_make(&found, type, &node) != 0) {
        abort();
    }
    return node;
}

static uint32_t number_at(const unsigned char *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

// Makes the directories on the way to `path`, and `path` a file with the given bytes.
static void make_fixed(const char *path, const char *bytes, uint32_t size) {
    char prefix[VFS_MAX_PATH];
    for (const char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        memcpy(prefix, path, (size_t)(slash - path));
        prefix[slash - path] = '\0';
        Found found;
        if (vfs_find(root, prefix, VFS_FOLLOW, &found) == 0 && found.node == NULL) {
            must_make(prefix, __WASI_FILETYPE_DIRECTORY);
        }
    }
    Node *node = must_make(path, __WASI_FILETYPE_REGULAR_FILE);
    node->file.fixed = bytes;
    node->file.size = size;
}

void vfs_init(void) {
    root = new_node(__WASI_FILETYPE_DIRECTORY);
    if (root == NULL) {
        abort();
    }
    root->links = 1;
    root->directory.parent = root;

    static const struct {
        const char *path;
        Device device;
    } devices[] = {
        {"/dev/null", DEVICE_NULL},     {"/dev/zero", DEVICE_ZERO},     {"/dev/random", DEVICE_RANDOM},
        {"/dev/urandom", DEVICE_RANDOM}, {"/dev/stdin", DEVICE_STDIN},  {"/dev/stdout", DEVICE_STDOUT},
        {"/dev/stderr", DEVICE_STDERR},
    };
    must_make("/dev", __WASI_FILETYPE_DIRECTORY);
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        must_make(devices[i].path, __WASI_FILETYPE_CHARACTER_DEVICE)->device = devices[i].device;
    }
    for (const unsigned char *at = zone_index; at < zone_index + sizeof zone_index;) {
        const char *path = (const char *)at;
        at += strlen(path) + 1;
        make_fixed(path, (const char *)zone_data + number_at(at), number_at(at + 4));
        at += 8;
    }
    vfs_seal("/dev");
    vfs_seal("/usr");
    must_make("/tmp", __WASI_FILETYPE_DIRECTORY)->mode = 01777;
    must_make("/work", __WASI_FILETYPE_DIRECTORY);
}

// Files are few and shallow when this runs, before any program.
static void seal_tree(Node *node) {
    node->is_read_only = true;
    if (node->type == __WASI_FILETYPE_DIRECTORY) {
        for (Entry *entry = node->directory.first; entry != NULL; entry = entry->next) {
            seal_tree(entry->node);
        }
    }
}

Errno vfs_seal(const char *path) {
    Found found;
    Errno failed = vfs_find_existing(root, path, VFS_FOLLOW, &found);
    if (!failed) {
        seal_tree(found.node);
        bytes_used = 0;
        node_count = 0;
    }
    return failed;
}
