//! Images on this machine: `buildah` builds them, and what is kept of each is its root filesystem, in a folder.
//!
//! Builds run one at a time, whatever process asks, in namespaces of processes and mounts that end with them. The
//! steps of a recipe run with nearly root's rights all the same: recipes are trusted as their tasks are.
//!
//! ```text
//! FOLDER/lock             held by who builds
//! FOLDER/storage, run     buildah's own: images that recipes start from
//! FOLDER/work             the build that is under way; what is there before one was left by a killed process
//! FOLDER/TAG/root         a root filesystem that is whole
//! FOLDER/TAG/config.json  what the image says of its programs
//! ```

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::fs::{FlockOperation, flock, statvfs};
use serde_json::Value;

use super::turns::Turns;
use super::{Built, ImageBuilder, Recipe};
use crate::actor::removal::remove_tree;
use crate::actor::{ActorError, Entry, RootFs, TreeLimits};
use crate::process::{self, Finished, find_program};

/// The program, and what installs it.
const PROGRAM: &str = "buildah";
const REMEDY: &str = "apt-get install --no-install-recommends buildah";
/// Room on the disk that builds leave, in bytes.
const RESERVE: u64 = 1 << 30;
/// Time between looks at the room that is left.
const LOOK: Duration = Duration::from_millis(500);
/// Time between looks at whether another process has done its build.
const POLL: Duration = Duration::from_millis(100);
/// How long a call of `buildah` may take that builds nothing.
const CALL: Duration = Duration::from_mins(5);
/// What is kept of a build's output.
const MAX_OUTPUT: usize = 32 << 10;
/// The most bytes of the end of an output that are told.
const TOLD: usize = 8 << 10;
/// The largest configuration of an image that is read.
const MAX_CONFIG: u64 = 1 << 20;

/// How images are built on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildahOptions {
    /// Where root filesystems are kept, and what builds start from.
    pub folder: PathBuf,
    /// Whether builds have a network: to fetch what they start from, and for their steps.
    pub network: bool,
    /// How long a build may take, once it is its turn.
    pub timeout: Duration,
    /// The most bytes that a root filesystem may have.
    pub max_size: u64,
}

/// Builds images on this machine.
#[derive(Debug)]
pub struct Buildah {
    options: BuildahOptions,
    turns: Turns,
    ends: AtomicBool,
}

impl Buildah {
    /// Looks for the programs that it needs, and makes its folder.
    ///
    /// # Errors
    ///
    /// Fails where a program is missing, where this is not root, and where the folder cannot be made or is another
    /// user's.
    pub fn open(mut options: BuildahOptions) -> Result<Self, ActorError> {
        for (program, remedy) in [
            (PROGRAM, REMEDY),
            ("unshare", "apt-get install util-linux"),
            ("setpriv", "apt-get install util-linux"),
        ] {
            find_program(Path::new(program)).ok_or(ActorError::NotInstalled { program, remedy })?;
        }
        if !rustix::process::geteuid().is_root() {
            return Err(ActorError::Unusable {
                backend: PROGRAM,
                reason: "needs root here; run `wardian` as root, or give `actor.root`, which stands in for \
                         the images of all tasks"
                    .to_owned(),
            });
        }
        let files = |source| ActorError::Files {
            activity: "making the folder of images",
            source,
        };
        if !options.folder.exists() {
            fs::create_dir_all(&options.folder).map_err(files)?;
            // Who runs as another user for this one must get through, and see nothing on the way.
            let mode = std::fs::Permissions::from_mode(0o711);
            fs::set_permissions(&options.folder, mode).map_err(files)?;
        }
        options.folder = fs::canonicalize(&options.folder).map_err(files)?;
        let status = fs::metadata(&options.folder).map_err(files)?;
        let is_own = status.uid() == rustix::process::geteuid().as_raw();
        if !status.is_dir() || !is_own || status.mode() & 0o022 != 0 {
            return Err(ActorError::InvalidSpec {
                reason: format!(
                    "`{}` must be a folder of this user that nobody else may write to, to keep root filesystems in",
                    options.folder.display()
                ),
            });
        }
        Ok(Self {
            options,
            turns: Turns::default(),
            ends: AtomicBool::new(false),
        })
    }

    fn kept(&self, tag: &str) -> PathBuf {
        self.options.folder.join(tag)
    }

    /// Waits until no other process builds.
    fn lock(&self) -> Result<std::fs::File, ActorError> {
        let files = |source: std::io::Error| ActorError::Files {
            activity: "locking the folder of images",
            source,
        };
        let file = std::fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.options.folder.join("lock"))
            .map_err(files)?;
        let until = process::deadline(self.options.timeout);
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(files(error.into())),
            }
            self.goes_on()?;
            if Instant::now() >= until {
                return Err(failed("another process builds images for too long"));
            }
            std::thread::sleep(POLL);
        }
    }

    fn goes_on(&self) -> Result<(), ActorError> {
        match self.ends.load(Ordering::Relaxed) {
            true => Err(failed("the run ends")),
            false => Ok(()),
        }
    }

    fn make(&self, tag: &str, recipe: &Recipe) -> Result<(), ActorError> {
        if self.kept(tag).is_dir() {
            return Ok(());
        }
        let lock = self.lock()?;
        // Another process may have built it meanwhile.
        if self.kept(tag).is_dir() {
            return Ok(());
        }
        let work = self.options.folder.join("work");
        let made = self.make_in(&work, tag, recipe);
        if let Err(error) = clear(&work) {
            tracing::warn!(%error, "a build's folder is left over until the next one");
        }
        drop(lock);
        made
    }

    /// Builds in `work`; what is there is an earlier build's, of a process that was killed.
    fn make_in(&self, work: &Path, tag: &str, recipe: &Recipe) -> Result<(), ActorError> {
        let files = |source| ActorError::Files {
            activity: "making room for a build",
            source,
        };
        clear(work).map_err(files)?;
        fs::create_dir(work).map_err(files)?;
        fs::set_permissions(work, std::fs::Permissions::from_mode(0o700)).map_err(files)?;
        let started = Instant::now();
        tracing::info!(tag, "building an image with `buildah`");
        if self.options.folder.join("storage").is_dir() {
            // Of builds that did not end.
            self.call(&["rm", "--all"])?;
            self.call(&["rmi", "--prune"])?;
        }
        let place = |name: &str| work.join(name);
        write_context(recipe, &place("context"))?;
        fs::create_dir(place("done")).map_err(files)?;
        self.bud(recipe, work)?;
        let id = read_text(&place("id")).map_err(files)?;
        let config = self.call(&["inspect", "--type", "image", "--format", "{{.Config}}", &id])?;
        fs::write(place("done/config.json"), &config.stdout.head).map_err(files)?;
        // What it starts from stays for other builds.
        self.call(&["rmi", "--force", &id])?;
        let root = place("done/root");
        let size = size_of(&root, self.options.max_size).map_err(files)?;
        if size > self.options.max_size {
            return Err(failed(&format!(
                "its root filesystem has more than {} bytes, which is the most that `actor.image_build.max_size` \
                 lets it have",
                self.options.max_size
            )));
        }
        // `buildah` makes it for root alone, and who works in it may be anybody.
        fs::set_permissions(&root, std::fs::Permissions::from_mode(0o755)).map_err(files)?;
        fs::set_permissions(place("done"), std::fs::Permissions::from_mode(0o711))
            .map_err(files)?;
        // From here on it is whole.
        fs::rename(place("done"), self.kept(tag)).map_err(files)?;
        let seconds = started.elapsed().as_secs_f64();
        tracing::info!(tag, seconds, bytes = size, "an image is built");
        Ok(())
    }

    /// Has `buildah` build what is in `work`.
    fn bud(&self, recipe: &Recipe, work: &Path) -> Result<(), ActorError> {
        let option = |name: &str, file: &str| format!("{name}{}", work.join(file).display());
        let mut command = self.command();
        command
            .args([
                "bud",
                "--isolation=chroot",
                "--layers=false",
                "--format=oci",
            ])
            .arg(option("--iidfile=", "id"))
            .arg(option("--output=type=local,dest=", "done/root"))
            .arg("--file")
            .arg(work.join("context").join(&recipe.dockerfile));
        if !self.options.network {
            command.arg("--pull-never");
        }
        command.arg(work.join("context"));
        let (mut last, mut is_full) = (Instant::now(), false);
        let finished = self.run(&mut command, self.options.timeout, || {
            if last.elapsed() >= LOOK {
                last = Instant::now();
                is_full = room(&self.options.folder).is_some_and(|room| room < RESERVE);
            }
            is_full
        })?;
        if finished.is_success() {
            return Ok(());
        }
        self.goes_on()?;
        let why = match (is_full, finished.timed_out) {
            (true, _) => format!(
                "less than {} MiB are left on the disk of `{}`; delete what is not needed there, or name a folder \
                 elsewhere in `actor.image_build.folder`",
                RESERVE >> 20,
                self.options.folder.display()
            ),
            (false, true) => format!(
                "it took longer than {} s, which is all that `actor.image_build.timeout` gives it",
                self.options.timeout.as_secs_f64()
            ),
            (false, false) => "`buildah` could not build it".to_owned(),
        };
        Err(failed(&format!("{why}\n{}", end_of(&finished))))
    }

    /// Runs `buildah` for something that builds nothing.
    fn call(&self, arguments: &[&str]) -> Result<Finished, ActorError> {
        let mut command = self.command();
        command.args(arguments);
        let finished = self.run(&mut command, CALL, || false)?;
        match finished.is_success() && !finished.stdout.is_truncated() {
            true => Ok(finished),
            false => {
                self.goes_on()?;
                let call = arguments.first().copied().unwrap_or_default();
                Err(failed(&format!(
                    "`buildah {call}` failed\n{}",
                    end_of(&finished)
                )))
            }
        }
    }

    fn run(
        &self,
        command: &mut Command,
        timeout: Duration,
        mut is_over: impl FnMut() -> bool,
    ) -> Result<Finished, ActorError> {
        let ran = process::run(
            command,
            &[],
            timeout,
            MAX_OUTPUT,
            |_| self.ends.load(Ordering::Relaxed) || is_over(),
            // Its group is killed, and the first process of its namespace with it.
            |pid| {
                let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
            },
        );
        ran.map_err(|source| ActorError::Run {
            program: PROGRAM.to_owned(),
            source,
        })
    }

    /// Returns a call of `buildah`, whose processes all end with it, and it with this one.
    fn command(&self) -> Command {
        let inside = |name: &str| self.options.folder.join(name);
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid"]);
        if !self.options.network {
            command.arg("--net");
        }
        command
            .args(["--fork", "--kill-child=KILL", "--mount-proc", PROGRAM])
            .args(["--storage-driver", "vfs", "--root"])
            .arg(inside("storage"))
            .arg("--runroot")
            .arg(inside("run"))
            .env_clear()
            .env("HOME", inside("run"))
            .env("LANG", "C.UTF-8")
            .env("TMPDIR", inside("work"))
            .current_dir("/");
        // How the network is reached, and who the user is to registries, is this machine's to say.
        let kept = [
            "PATH",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "NO_PROXY",
            "http_proxy",
            "https_proxy",
            "no_proxy",
            "REGISTRY_AUTH_FILE",
            "CONTAINERS_REGISTRIES_CONF",
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
        ];
        for name in kept {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command
    }
}

impl ImageBuilder for Buildah {
    fn max_context(&self) -> u64 {
        TreeLimits::default().bytes
    }

    fn build(&self, recipe: &Recipe) -> Result<Built, ActorError> {
        let tag = recipe.tag();
        self.turns.once(&tag, || {
            self.goes_on()?;
            self.make(&tag, recipe)
        })?;
        let folder = self.kept(&tag);
        let config = read_config(&folder.join("config.json"))?;
        Ok(Built {
            root: RootFs::Folder(folder.join("root")),
            workdir: workdir_of(&config),
            env: variables_of(&config),
        })
    }

    /// What is named is fetched; the recipe would only make it again.
    fn image(&self, image: &str, _recipe: Option<&Recipe>) -> Result<Built, ActorError> {
        self.build(&Recipe::of_image(image)?)
    }

    fn shut_down(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

fn failed(message: &str) -> ActorError {
    ActorError::Backend {
        activity: "building an image on this machine".to_owned(),
        message: message.to_owned(),
    }
}

fn clear(folder: &Path) -> std::io::Result<()> {
    match fs::symlink_metadata(folder) {
        Ok(_) => remove_tree(folder),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes what a build sees, links included: `buildah` does not follow them out of the folder.
fn write_context(recipe: &Recipe, folder: &Path) -> Result<(), ActorError> {
    let writing = |source| ActorError::Files {
        activity: "writing a build's context",
        source,
    };
    recipe.context.write_to(folder)?;
    for (path, entry) in recipe.context.iter() {
        if let Entry::Link { target } = entry {
            // Nothing of a tree is inside of a link, so that none is on the way to another.
            let path = folder.join(path);
            if let Some(above) = path.parent() {
                fs::create_dir_all(above).map_err(writing)?;
            }
            std::os::unix::fs::symlink(target, &path).map_err(writing)?;
        }
    }
    Ok(())
}

/// Returns the bytes that are free for others than root, where that can be told.
fn room(folder: &Path) -> Option<u64> {
    let status = statvfs(folder).ok()?;
    status.f_bavail.checked_mul(status.f_frsize)
}

/// Returns the bytes that the files below a folder have on the disk; counts no further than beyond `limit`.
fn size_of(folder: &Path, limit: u64) -> std::io::Result<u64> {
    let (mut size, mut folders) = (0_u64, vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let status = entry.metadata()?;
            size = size.saturating_add(status.blocks().saturating_mul(512));
            if status.is_dir() {
                folders.push(entry.path());
            }
            if size > limit {
                return Ok(size);
            }
        }
    }
    Ok(size)
}

/// Returns the end of what a program said, both streams.
fn end_of(finished: &Finished) -> String {
    let text = format!("{}\n{}", finished.stdout.text(), finished.stderr.text());
    let text = text.trim();
    let from = (text.len().saturating_sub(TOLD)..).find(|at| text.is_char_boundary(*at));
    text.get(from.unwrap_or_default()..)
        .unwrap_or_default()
        .to_owned()
}

fn read_text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?
        .take(MAX_CONFIG)
        .read_to_string(&mut text)?;
    Ok(text.trim().to_owned())
}

fn read_config(path: &Path) -> Result<Value, ActorError> {
    let reading = |source| ActorError::Files {
        activity: "reading what an image says of itself",
        source,
    };
    let text = read_text(path).map_err(reading)?;
    serde_json::from_str(&text).map_err(|error| reading(error.into()))
}

/// Returns the folder of an image's programs, unless it is `/`.
fn workdir_of(config: &Value) -> Option<PathBuf> {
    let folder = PathBuf::from(config["config"]["WorkingDir"].as_str()?);
    let is_plain = folder.components().all(|part| {
        use std::path::Component::{Normal, RootDir};
        matches!(part, RootDir | Normal(_))
    });
    (folder.is_absolute() && is_plain && folder != Path::new("/")).then_some(folder)
}

fn variables_of(config: &Value) -> BTreeMap<String, String> {
    let given = config["config"]["Env"].as_array().into_iter().flatten();
    given
        .filter_map(|variable| variable.as_str()?.split_once('='))
        .filter(|(name, value)| !name.is_empty() && !name.contains('\0') && !value.contains('\0'))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_an_image_says_is_read() {
        let config = |folder: &str| json!({ "config": { "WorkingDir": folder } });
        for (folder, expected) in [
            ("/app", Some("/app")),
            ("/", None),
            ("app", None),
            ("/a/../b", None),
            ("", None),
        ] {
            let found = workdir_of(&config(folder));
            assert_eq!(found.as_deref(), expected.map(Path::new), "{folder}");
        }
        assert_eq!(workdir_of(&Value::Null), None);
        let config = json!({ "config": { "Env": ["A=1=2", "=x", "none", 3, "B="] } });
        let variables = variables_of(&config);
        let expected = [("A", "1=2"), ("B", "")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(variables, BTreeMap::from(expected));
        assert!(variables_of(&Value::Null).is_empty());
    }

    #[test]
    fn a_size_is_counted_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("inside")).unwrap();
        fs::write(folder.path().join("inside/file"), vec![1; 100_000]).unwrap();
        std::os::unix::fs::symlink("/", folder.path().join("link")).unwrap();
        let size = size_of(folder.path(), u64::MAX).unwrap();
        assert!((100_000..1 << 20).contains(&size), "{size}");
        assert!(size_of(folder.path(), 10).unwrap() > 10);
        assert!(room(folder.path()).is_some());
        assert_eq!(room(Path::new("/no/where")), None);
    }
}
