//! The files that a guest with WASI's file functions sees: a tree in the host's memory, private to
//! the instance.
//!
//! Part of it may be files of the host's, read-only and opened beforehand ([`Files::mount`]);
//! nothing in here opens anything. All sizes and counts are bounded, and copying a tree copies no
//! content until one of the copies writes to it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use crate::sandbox::wasi::Errno;

/// The most bytes of all files that a guest wrote.
const MAX_BYTES: usize = 64 << 20;
/// The most files and folders.
const MAX_NODES: usize = 16384;
/// The most open files and folders.
const MAX_OPEN: usize = 256;
/// The longest path and the longest name in it, in bytes.
const MAX_PATH: usize = 4096;
const MAX_NAME: usize = 255;
/// The first descriptor that is no standard stream: the root folder, always open.
pub(super) const ROOT: u32 = 3;

/// The number of a file or folder, for as long as it exists.
type NodeId = u64;
/// The root folder's number.
const ROOT_NODE: NodeId = 1;

/// A tree of files and the guest's open descriptors.
#[derive(Debug, Clone)]
pub(in crate::sandbox) struct Files {
    nodes: BTreeMap<NodeId, Node>,
    next_node: NodeId,
    open: BTreeMap<u32, Descriptor>,
    /// Bytes of the files that the guest wrote.
    used: usize,
}

#[derive(Debug, Clone)]
struct Node {
    content: Content,
    /// Cannot be changed, nor anything in it.
    is_sealed: bool,
    /// Virtual time of the last change, in ns since 1970.
    modified_ns: u64,
    /// Removed, and kept for the descriptors that are open on it.
    is_unlinked: bool,
}

#[derive(Debug, Clone)]
enum Content {
    Folder {
        parent: NodeId,
        entries: BTreeMap<String, NodeId>,
    },
    #[expect(clippy::rc_buffer, reason = "it grows in place while nobody shares it")]
    Bytes(Arc<Vec<u8>>),
    /// A file of the host's.
    Mounted { file: Arc<File>, length: u64 },
}

/// What a guest has open.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    node: NodeId,
    position: u64,
    access: Access,
}

/// What a descriptor is for.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Access {
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) append: bool,
}

/// How a path is opened, beyond its access.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Opening {
    pub(super) create: bool,
    pub(super) exclusive: bool,
    pub(super) truncate: bool,
    pub(super) folder: bool,
}

/// What a file or folder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Folder,
    File,
}

/// What is said about a file or folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) number: u64,
    pub(super) kind: Kind,
    pub(super) size: u64,
    pub(super) modified_ns: u64,
}

impl Files {
    /// Makes a tree of nothing but the root.
    pub(in crate::sandbox) fn new() -> Self {
        let root = Node {
            content: Content::Folder {
                parent: ROOT_NODE,
                entries: BTreeMap::new(),
            },
            is_sealed: false,
            modified_ns: 0,
            is_unlinked: false,
        };
        let descriptor = Descriptor {
            node: ROOT_NODE,
            position: 0,
            access: Access::default(),
        };
        Self {
            nodes: BTreeMap::from([(ROOT_NODE, root)]),
            next_node: ROOT_NODE + 1,
            open: BTreeMap::from([(ROOT, descriptor)]),
            used: 0,
        }
    }

    /// Adds a file of the host's to `folder`, which is made. It must not change any more.
    pub(in crate::sandbox) fn mount(
        &mut self,
        folder: &[&str],
        name: &str,
        file: Arc<File>,
    ) -> std::io::Result<()> {
        let length = file.metadata()?.len();
        let parent = self.make_folders(folder);
        let node = self.add_node(Content::Mounted { file, length }, 0);
        self.entries_mut(parent)
            .expect("a folder was made")
            .insert(name.to_owned(), node);
        Ok(())
    }

    /// Makes a folder and those above it.
    pub(in crate::sandbox) fn make_folders(&mut self, path: &[&str]) -> NodeId {
        let mut parent = ROOT_NODE;
        for name in path {
            parent = match self.entries(parent).ok().and_then(|found| found.get(*name)) {
                Some(&node) => node,
                None => {
                    let content = Content::Folder {
                        parent,
                        entries: BTreeMap::new(),
                    };
                    let node = self.add_node(content, 0);
                    if let Ok(entries) = self.entries_mut(parent) {
                        entries.insert((*name).to_owned(), node);
                    }
                    node
                }
            };
        }
        parent
    }

    /// Makes what is there so far unchangeable, but for the content of the folders named.
    pub(in crate::sandbox) fn seal_all_but(&mut self, open: &[&[&str]]) {
        let open: Vec<_> = open.iter().map(|path| self.make_folders(path)).collect();
        for (node, content) in &mut self.nodes {
            content.is_sealed = !open.contains(node);
        }
    }

    /// Returns whether a guest at rest left everything as it found it, in a tree that was
    /// `before`.
    pub(in crate::sandbox) fn is_as_before(&self, before: &Self) -> bool {
        self.used == before.used
            && self.nodes.keys().eq(before.nodes.keys())
            && self.open.keys().eq(before.open.keys())
    }

    /// Returns whether nothing was written and nothing is open but the root.
    pub(in crate::sandbox) fn is_pristine(&self) -> bool {
        let is_written = |node: &Node| {
            !node.is_sealed
                && !matches!(&node.content, Content::Folder { entries, .. } if entries.is_empty())
        };
        self.open.len() == 1 && !self.nodes.values().any(is_written)
    }

    /// Returns whether the tree is a tree, and within its bounds.
    #[cfg(test)]
    pub(super) fn is_sound(&self) -> bool {
        let sizes = self.nodes.values().map(|node| match &node.content {
            Content::Bytes(bytes) => bytes.len(),
            Content::Folder { .. } | Content::Mounted { .. } => 0,
        });
        let named = |number: &NodeId| {
            let is_named = |node: &Node| {
                matches!(&node.content, Content::Folder { entries, .. }
                    if entries.values().any(|entry| entry == number))
            };
            *number == ROOT_NODE || self.nodes.values().any(is_named)
        };
        let mut nodes = self.nodes.iter();
        sizes.sum::<usize>() == self.used
            && self.used <= MAX_BYTES
            && self.nodes.len() <= MAX_NODES
            && self.open.len() <= MAX_OPEN
            && self
                .open
                .values()
                .all(|open| self.nodes.contains_key(&open.node))
            && nodes.all(|(number, node)| {
                let is_folder = matches!(node.content, Content::Folder { .. });
                let is_rooted = || self.is_within(*number, ROOT_NODE) == Ok(true);
                named(number) != node.is_unlinked && (!is_folder || node.is_unlinked || is_rooted())
            })
    }

    // === Descriptors ===

    /// Opens the path from the folder `at`, and returns the descriptor.
    pub(super) fn open(
        &mut self,
        at: u32,
        path: &str,
        opening: Opening,
        access: Access,
        now_ns: u64,
    ) -> Result<u32, Errno> {
        if self.open.len() >= MAX_OPEN {
            return Err(Errno::TooManyOpen);
        }
        let (parent, name) = self.resolve(at, path)?;
        let existing = self.lookup(parent, name)?;
        let node = match existing {
            Some(_) if opening.create && opening.exclusive => return Err(Errno::Exists),
            Some(node) => {
                let is_folder = matches!(self.node(node)?.content, Content::Folder { .. });
                if opening.folder && !is_folder {
                    return Err(Errno::NotAFolder);
                }
                if is_folder && (access.write || opening.truncate) {
                    return Err(Errno::IsAFolder);
                }
                if (access.write || opening.truncate) && self.node(node)?.is_sealed {
                    return Err(Errno::ReadOnly);
                }
                if opening.truncate {
                    self.set_node_size(node, 0, now_ns)?;
                }
                node
            }
            None if opening.create && !opening.folder => {
                self.insert(parent, name, Content::Bytes(Arc::default()), now_ns)?
            }
            None => return Err(Errno::NotFound),
        };
        let mut number = ROOT;
        while self.open.contains_key(&number) {
            number += 1;
        }
        let descriptor = Descriptor {
            node,
            position: 0,
            access,
        };
        self.open.insert(number, descriptor);
        Ok(number)
    }

    /// Closes a descriptor. The root stays open.
    pub(super) fn close(&mut self, number: u32) -> Result<(), Errno> {
        if number == ROOT {
            return Err(Errno::NotSupported);
        }
        let descriptor = self.open.remove(&number).ok_or(Errno::BadFile)?;
        self.forget_if_unused(descriptor.node);
        Ok(())
    }

    /// Returns what a descriptor is open on and for.
    pub(super) fn describe(&self, number: u32) -> Result<(Status, Access), Errno> {
        let descriptor = self.descriptor(number)?;
        Ok((self.status_of(descriptor.node)?, descriptor.access))
    }

    /// Sets whether writing goes to the end.
    pub(super) fn set_append(&mut self, number: u32, append: bool) -> Result<(), Errno> {
        let descriptor = self.open.get_mut(&number).ok_or(Errno::BadFile)?;
        descriptor.access.append = append;
        Ok(())
    }

    /// Reads at `at`, or at the descriptor's position, which moves. 0 bytes are the end.
    pub(super) fn read(
        &mut self,
        number: u32,
        at: Option<u64>,
        buffer: &mut [u8],
    ) -> Result<usize, Errno> {
        let descriptor = self.descriptor(number)?;
        if !descriptor.access.read {
            return Err(Errno::BadFile);
        }
        let from = at.unwrap_or(descriptor.position);
        let count = match &self.node(descriptor.node)?.content {
            Content::Folder { .. } => return Err(Errno::IsAFolder),
            Content::Bytes(bytes) => {
                let start = usize::try_from(from).unwrap_or(usize::MAX);
                let rest = bytes.get(start..).unwrap_or_default();
                let count = rest.len().min(buffer.len());
                buffer[..count].copy_from_slice(&rest[..count]);
                count
            }
            Content::Mounted { file, length } => {
                let rest = usize::try_from(length.saturating_sub(from)).unwrap_or(usize::MAX);
                let count = rest.min(buffer.len());
                file.read_exact_at(&mut buffer[..count], from)
                    .map_err(|_| Errno::InputOutput)?;
                count
            }
        };
        if at.is_none()
            && let Some(descriptor) = self.open.get_mut(&number)
        {
            descriptor.position = from + count as u64;
        }
        Ok(count)
    }

    /// Writes all of `bytes` at `at`, or at the descriptor's position, which moves.
    pub(super) fn write(
        &mut self,
        number: u32,
        at: Option<u64>,
        bytes: &[u8],
        now_ns: u64,
    ) -> Result<(), Errno> {
        let descriptor = self.descriptor(number)?;
        if !descriptor.access.write {
            return Err(Errno::BadFile);
        }
        let length =
            usize::try_from(self.status_of(descriptor.node)?.size).map_err(|_| Errno::TooLarge)?;
        let start = match at {
            Some(at) => usize::try_from(at).map_err(|_| Errno::TooLarge)?,
            None if descriptor.access.append => length,
            None => usize::try_from(descriptor.position).map_err(|_| Errno::TooLarge)?,
        };
        let end = start.checked_add(bytes.len()).ok_or(Errno::TooLarge)?;
        if end > length {
            self.set_node_size(descriptor.node, end, now_ns)?;
        }
        let node = self.node_mut(descriptor.node)?;
        let Content::Bytes(content) = &mut node.content else {
            return Err(Errno::BadFile);
        };
        Arc::make_mut(content)[start..end].copy_from_slice(bytes);
        node.modified_ns = now_ns;
        if at.is_none()
            && let Some(descriptor) = self.open.get_mut(&number)
        {
            descriptor.position = end as u64;
        }
        Ok(())
    }

    /// Returns the descriptor's position.
    pub(super) fn position(&self, number: u32) -> Result<u64, Errno> {
        Ok(self.descriptor(number)?.position)
    }

    /// Moves the descriptor's position.
    pub(super) fn seek(&mut self, number: u32, position: u64) -> Result<(), Errno> {
        let descriptor = self.open.get_mut(&number).ok_or(Errno::BadFile)?;
        descriptor.position = position;
        Ok(())
    }

    /// Cuts or extends a file that is open for writing.
    pub(super) fn set_size(&mut self, number: u32, size: u64, now_ns: u64) -> Result<(), Errno> {
        let descriptor = self.descriptor(number)?;
        if !descriptor.access.write {
            return Err(Errno::BadFile);
        }
        let size = usize::try_from(size).map_err(|_| Errno::TooLarge)?;
        self.set_node_size(descriptor.node, size, now_ns)
    }

    /// Sets the time of the last change of what is open.
    pub(super) fn set_modified(&mut self, number: u32, time_ns: u64) -> Result<(), Errno> {
        let node = self.descriptor(number)?.node;
        self.set_node_modified(node, time_ns)
    }

    /// Returns the entries of an open folder after the first `skipped`: names and what they are.
    pub(super) fn entries_after(
        &self,
        number: u32,
        skipped: u64,
    ) -> Result<impl Iterator<Item = (&str, Status)>, Errno> {
        let entries = self.entries(self.descriptor(number)?.node)?;
        let skipped = usize::try_from(skipped).unwrap_or(usize::MAX);
        Ok(entries
            .iter()
            .skip(skipped)
            .filter_map(|(name, &node)| Some((name.as_str(), self.status_of(node).ok()?))))
    }

    // === Paths ===

    pub(super) fn status(&self, at: u32, path: &str) -> Result<Status, Errno> {
        let (parent, name) = self.resolve(at, path)?;
        self.status_of(self.lookup(parent, name)?.ok_or(Errno::NotFound)?)
    }

    /// Sets the time of the last change of a path.
    pub(super) fn set_path_modified(
        &mut self,
        at: u32,
        path: &str,
        time_ns: u64,
    ) -> Result<(), Errno> {
        let (parent, name) = self.resolve(at, path)?;
        let node = self.lookup(parent, name)?.ok_or(Errno::NotFound)?;
        self.set_node_modified(node, time_ns)
    }

    pub(super) fn create_folder(&mut self, at: u32, path: &str, now_ns: u64) -> Result<(), Errno> {
        let (parent, name) = self.resolve(at, path)?;
        if self.lookup(parent, name)?.is_some() {
            return Err(Errno::Exists);
        }
        let content = Content::Folder {
            parent,
            entries: BTreeMap::new(),
        };
        self.insert(parent, name, content, now_ns)?;
        Ok(())
    }

    pub(super) fn remove_folder(&mut self, at: u32, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.resolve(at, path)?;
        let node = self.lookup(parent, name)?.ok_or(Errno::NotFound)?;
        if !self.entries(node)?.is_empty() {
            return Err(Errno::NotEmpty);
        }
        self.unlink(parent, name, node)
    }

    pub(super) fn remove_file(&mut self, at: u32, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.resolve(at, path)?;
        let node = self.lookup(parent, name)?.ok_or(Errno::NotFound)?;
        if self.entries(node).is_ok() {
            return Err(Errno::IsAFolder);
        }
        self.unlink(parent, name, node)
    }

    pub(super) fn rename(&mut self, from: (u32, &str), to: (u32, &str)) -> Result<(), Errno> {
        let (old_parent, old_name) = self.resolve(from.0, from.1)?;
        let (new_parent, new_name) = self.resolve(to.0, to.1)?;
        let node = self.lookup(old_parent, old_name)?.ok_or(Errno::NotFound)?;
        if self.node(node)?.is_sealed || old_name.is_empty() || new_name.is_empty() {
            return Err(Errno::ReadOnly);
        }
        for parent in [old_parent, new_parent] {
            if self.node(parent)?.is_sealed {
                return Err(Errno::ReadOnly);
            }
        }
        let is_folder = self.entries(node).is_ok();
        if is_folder && self.is_within(new_parent, node)? {
            return Err(Errno::Invalid);
        }
        match self.lookup(new_parent, new_name)? {
            Some(replaced) if replaced == node => return Ok(()),
            Some(replaced) => {
                match (is_folder, self.entries(replaced).map(BTreeMap::is_empty)) {
                    (true, Ok(false)) => return Err(Errno::NotEmpty),
                    (true, Err(_)) => return Err(Errno::NotAFolder),
                    (false, Ok(_)) => return Err(Errno::IsAFolder),
                    (true, Ok(true)) | (false, Err(_)) => {}
                }
                self.unlink(new_parent, new_name, replaced)?;
            }
            None => {}
        }
        let (old_name, new_name) = (old_name.to_owned(), new_name.to_owned());
        self.entries_mut(old_parent)?.remove(&old_name);
        self.entries_mut(new_parent)?.insert(new_name, node);
        if let Content::Folder { parent, .. } = &mut self.node_mut(node)?.content {
            *parent = new_parent;
        }
        Ok(())
    }

    // === Inside ===

    /// Returns the folder that a path ends in and the last name, which is empty for the folder
    /// itself.
    fn resolve<'a>(&self, at: u32, path: &'a str) -> Result<(NodeId, &'a str), Errno> {
        if path.is_empty() {
            return Err(Errno::NotFound);
        }
        if path.len() > MAX_PATH {
            return Err(Errno::NameTooLong);
        }
        let mut folder = self.descriptor(at)?.node;
        self.entries(folder)?;
        let names: Vec<_> = path
            .split('/')
            .filter(|name| !matches!(*name, "" | "."))
            .collect();
        let Some((&last, above)) = names.split_last() else {
            return Ok((folder, ""));
        };
        for name in above {
            let node = self.lookup(folder, name)?.ok_or(Errno::NotFound)?;
            self.entries(node)?;
            folder = node;
        }
        if last == ".." {
            let node = self.lookup(folder, last)?.ok_or(Errno::NotFound)?;
            return Ok((node, ""));
        }
        if last.len() > MAX_NAME {
            return Err(Errno::NameTooLong);
        }
        Ok((folder, last))
    }

    /// Returns what a folder has under a name; the folder itself for no name.
    fn lookup(&self, folder: NodeId, name: &str) -> Result<Option<NodeId>, Errno> {
        let Content::Folder { parent, entries } = &self.node(folder)?.content else {
            return Err(Errno::NotAFolder);
        };
        Ok(match name {
            "" => Some(folder),
            ".." => Some(*parent),
            name => entries.get(name).copied(),
        })
    }

    /// Adds something new to a folder.
    fn insert(
        &mut self,
        parent: NodeId,
        name: &str,
        content: Content,
        now_ns: u64,
    ) -> Result<NodeId, Errno> {
        let folder = self.node(parent)?;
        if folder.is_unlinked || name.is_empty() {
            return Err(Errno::NotFound);
        }
        if folder.is_sealed {
            return Err(Errno::ReadOnly);
        }
        if self.nodes.len() >= MAX_NODES {
            return Err(Errno::NoSpace);
        }
        let node = self.add_node(content, now_ns);
        self.entries_mut(parent)?.insert(name.to_owned(), node);
        self.node_mut(parent)?.modified_ns = now_ns;
        Ok(node)
    }

    fn add_node(&mut self, content: Content, now_ns: u64) -> NodeId {
        let node = self.next_node;
        self.next_node += 1;
        self.nodes.insert(
            node,
            Node {
                content,
                is_sealed: false,
                modified_ns: now_ns,
                is_unlinked: false,
            },
        );
        node
    }

    fn unlink(&mut self, parent: NodeId, name: &str, node: NodeId) -> Result<(), Errno> {
        if name.is_empty() {
            return Err(Errno::Invalid);
        }
        if self.node(parent)?.is_sealed || self.node(node)?.is_sealed {
            return Err(Errno::ReadOnly);
        }
        self.entries_mut(parent)?.remove(name);
        self.node_mut(node)?.is_unlinked = true;
        self.forget_if_unused(node);
        Ok(())
    }

    /// Frees what was removed once nothing is open on it.
    fn forget_if_unused(&mut self, node: NodeId) {
        let is_gone = self.nodes.get(&node).is_some_and(|node| node.is_unlinked);
        if is_gone && !self.open.values().any(|descriptor| descriptor.node == node) {
            let removed = self.nodes.remove(&node);
            if let Some(Content::Bytes(bytes)) = removed.map(|node| node.content) {
                self.used -= bytes.len();
            }
        }
    }

    fn set_node_size(&mut self, node: NodeId, size: usize, now_ns: u64) -> Result<(), Errno> {
        let used = self.used;
        let node = self.node_mut(node)?;
        if node.is_sealed {
            return Err(Errno::ReadOnly);
        }
        let Content::Bytes(bytes) = &mut node.content else {
            return Err(Errno::Invalid);
        };
        let used = (used - bytes.len())
            .checked_add(size)
            .filter(|&used| used <= MAX_BYTES)
            .ok_or(Errno::NoSpace)?;
        Arc::make_mut(bytes).resize(size, 0);
        node.modified_ns = now_ns;
        self.used = used;
        Ok(())
    }

    fn set_node_modified(&mut self, node: NodeId, time_ns: u64) -> Result<(), Errno> {
        let node = self.node_mut(node)?;
        if node.is_sealed {
            return Err(Errno::ReadOnly);
        }
        node.modified_ns = time_ns;
        Ok(())
    }

    /// Returns whether `folder` is `ancestor` or lies in it.
    fn is_within(&self, mut folder: NodeId, ancestor: NodeId) -> Result<bool, Errno> {
        // A tree is no deeper than it has nodes.
        for _ in 0..=self.nodes.len() {
            if folder == ancestor {
                return Ok(true);
            }
            match &self.node(folder)?.content {
                Content::Folder { parent, .. } if *parent != folder => folder = *parent,
                _ => return Ok(false),
            }
        }
        Ok(false)
    }

    fn status_of(&self, number: NodeId) -> Result<Status, Errno> {
        let node = self.node(number)?;
        let (kind, size) = match &node.content {
            Content::Folder { .. } => (Kind::Folder, 0),
            Content::Bytes(bytes) => (Kind::File, bytes.len() as u64),
            Content::Mounted { length, .. } => (Kind::File, *length),
        };
        Ok(Status {
            number,
            kind,
            size,
            modified_ns: node.modified_ns,
        })
    }

    fn descriptor(&self, number: u32) -> Result<Descriptor, Errno> {
        self.open.get(&number).copied().ok_or(Errno::BadFile)
    }

    fn node(&self, number: NodeId) -> Result<&Node, Errno> {
        self.nodes.get(&number).ok_or(Errno::NotFound)
    }

    fn node_mut(&mut self, number: NodeId) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&number).ok_or(Errno::NotFound)
    }

    fn entries(&self, number: NodeId) -> Result<&BTreeMap<String, NodeId>, Errno> {
        match &self.node(number)?.content {
            Content::Folder { entries, .. } => Ok(entries),
            Content::Bytes(_) | Content::Mounted { .. } => Err(Errno::NotAFolder),
        }
    }

    fn entries_mut(&mut self, number: NodeId) -> Result<&mut BTreeMap<String, NodeId>, Errno> {
        match &mut self.node_mut(number)?.content {
            Content::Folder { entries, .. } => Ok(entries),
            Content::Bytes(_) | Content::Mounted { .. } => Err(Errno::NotAFolder),
        }
    }
}

#[cfg(test)]
mod tests;
