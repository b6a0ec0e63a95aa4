//! Actors that do what a test says in place of programs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::actor::{
    Actor, ActorBackend, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec,
    Capabilities, Captured, Ending, Entry, FileTree, Isolation, TreeLimits,
};

/// What a script knows of the actor that a command runs in.
#[derive(Debug, Default)]
pub(super) struct Inside {
    /// Which of all actors it is, from 0.
    pub(super) number: usize,
    pub(super) files: BTreeMap<PathBuf, Vec<u8>>,
    /// Whether it comes before others.
    pub(super) is_first: bool,
}

impl Inside {
    pub(super) fn write(&mut self, path: &str, text: &str) {
        self.files
            .insert(PathBuf::from(path), text.as_bytes().to_vec());
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.files.contains_key(Path::new(path))
    }
}

/// Says what a command, as one line, prints, or how it ends otherwise than with 0. Trees are moved by `put FOLDER` and
/// `get PATH`, which print nothing.
type Script = dyn Fn(&mut Inside, &str, &ActorCommand) -> Result<String, Ending> + Send + Sync;

/// Runs actors by a script.
pub(super) struct Scripted {
    script: Arc<Script>,
    count: AtomicUsize,
    live: Arc<AtomicUsize>,
    rare: AtomicUsize,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scripted").finish_non_exhaustive()
    }
}

impl Scripted {
    pub(super) fn new(
        script: impl Fn(&mut Inside, &str, &ActorCommand) -> Result<String, Ending>
        + Send
        + Sync
        + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            script: Arc::new(script),
            count: AtomicUsize::new(0),
            live: Arc::default(),
            rare: AtomicUsize::new(0),
        })
    }

    /// Returns how many actors were started.
    pub(super) fn started(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Returns how many of them were of a kind that is rarely asked for.
    pub(super) fn rare(&self) -> usize {
        self.rare.load(Ordering::SeqCst)
    }

    /// Returns how many there are.
    pub(super) fn live(&self) -> usize {
        self.live.load(Ordering::SeqCst)
    }
}

impl ActorBackend for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: Isolation::UserKernel,
            shell: true,
            network: false,
            root_folder: true,
            image: true,
            writable_root: true,
            background: true,
            users: true,
            snapshot: false,
            snapshot_memory: false,
            fork: false,
        }
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        self.live.fetch_add(1, Ordering::SeqCst);
        (self.rare).fetch_add(usize::from(spec.is_rare), Ordering::SeqCst);
        let inside = Inside {
            number: self.count.fetch_add(1, Ordering::SeqCst),
            ..Inside::default()
        };
        Ok(Box::new(ScriptedActor {
            script: Arc::clone(&self.script),
            spec: spec.clone(),
            inside: Mutex::new(inside),
            live: Arc::clone(&self.live),
        }))
    }
}

struct ScriptedActor {
    script: Arc<Script>,
    spec: ActorSpec,
    inside: Mutex<Inside>,
    live: Arc<AtomicUsize>,
}

impl std::fmt::Debug for ScriptedActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScriptedActor").finish_non_exhaustive()
    }
}

impl ScriptedActor {
    /// Moves a tree as the script says.
    fn transfer(&self, what: &str, path: &Path) -> Result<MutexGuard<'_, Inside>, ActorError> {
        let mut inside = self.inside.lock().unwrap();
        let command = ActorCommand::new([what.to_owned(), path.display().to_string()]);
        let path = path.to_owned();
        let message = String::new();
        match (self.script)(&mut inside, &command.argv.join(" "), &command) {
            Ok(_) => Ok(inside),
            Err(Ending::TimedOut { limit }) => Err(ActorError::TreeLate { path, limit }),
            Err(Ending::Exited { .. }) if what == "put" => {
                Err(ActorError::Unwritable { path, message })
            }
            Err(Ending::Exited { .. }) => Err(ActorError::Unreadable { path, message }),
            Err(_) => Err(ActorError::Ended {
                id: "scripted".to_owned(),
                reason: message,
            }),
        }
    }
}

impl Drop for ScriptedActor {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Actor for ScriptedActor {
    fn id(&self) -> &str {
        "scripted"
    }

    fn spec(&self) -> &ActorSpec {
        &self.spec
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        let mut inside = self.inside.lock().unwrap();
        let line = command.argv.join(" ");
        let (ending, printed) = match (self.script)(&mut inside, &line, command) {
            Ok(printed) => (Ending::Exited { code: 0 }, printed),
            Err(ending) => (ending, String::new()),
        };
        Ok(ActorOutput {
            ending,
            stdout: Captured {
                head: printed.into_bytes(),
                ..Captured::default()
            },
            stderr: Captured::default(),
            elapsed: Duration::ZERO,
        })
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        let mut inside = self.transfer("put", folder)?;
        for (path, entry) in tree.iter() {
            if let Entry::File { bytes, .. } = entry {
                inside.files.insert(folder.join(path), bytes.clone());
            }
        }
        Ok(())
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        let inside = self.transfer("get", path)?;
        let Some(bytes) = inside.files.get(path) else {
            return Err(ActorError::Unreadable {
                path: path.to_owned(),
                message: "it is not there".to_owned(),
            });
        };
        if bytes.len() as u64 > limits.bytes {
            return Err(ActorError::TreeTooLarge {
                limit: limits.bytes,
                unit: "bytes",
            });
        }
        FileTree::of_file(path.file_name().unwrap(), bytes.clone())
    }

    fn come_first(&self, is_first: bool) {
        self.inside.lock().unwrap().is_first = is_first;
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        unreachable!("it cannot")
    }

    fn logs(&self) -> String {
        String::new()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        Ok(())
    }
}
