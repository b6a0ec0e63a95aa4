//! The heavy tier with its real parts: gVisor and bubblewrap. Nothing here is skipped: what is not installed
//! fails with the command that installs it.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod bwrap;
pub(crate) mod conformance;
mod openenv;
mod openenv_actors;
mod runsc;
pub(crate) mod sandboxd;

use std::time::Duration;

use wardian::actor::bwrap::BwrapBackend;
use wardian::actor::runsc::{RunscBackend, RunscOptions};
use wardian::actor::{
    Actor, ActorBackend, ActorCommand, ActorLimits, ActorOutput, ActorSpec, RootFs,
};

/// A backend whose runs have a folder of their own, which must be empty in the end.
pub(super) struct Scene<B> {
    pub(super) backend: Option<B>,
    pub(super) base: tempfile::TempDir,
}

/// What every backend is tried with.
pub(crate) struct Case<'a> {
    backend: &'a dyn ActorBackend,
    spec: ActorSpec,
}

impl<'a> Case<'a> {
    pub(crate) fn new(backend: &'a dyn ActorBackend, spec: ActorSpec) -> Self {
        Self { backend, spec }
    }

    pub(crate) fn backend(&self) -> &dyn ActorBackend {
        self.backend
    }

    pub(crate) fn spec(&self) -> ActorSpec {
        self.spec.clone()
    }

    pub(crate) fn actor(&self) -> Box<dyn Actor> {
        self.backend.create(&self.spec).unwrap()
    }
}

impl<B: ActorBackend> Scene<B> {
    pub(super) fn case(&self) -> Case<'_> {
        Case::new(self.backend(), spec())
    }

    pub(super) fn backend(&self) -> &B {
        self.backend.as_ref().unwrap()
    }

    pub(super) fn actor(&self) -> Box<dyn Actor> {
        self.backend().create(&spec()).unwrap()
    }
}

impl<B> Scene<B> {
    /// Drops the backend and checks that nothing of it is left: no file, no process.
    pub(super) fn close(mut self) {
        drop(self.backend.take());
        let left = runs(self.base.path());
        assert!(left.is_empty(), "left behind: {left:?}");
        let processes = processes_naming(&self.base.path().to_string_lossy());
        assert!(processes.is_empty(), "left behind: {processes:?}");
    }
}

/// Returns the folders of runs in `base`.
pub(crate) fn runs(base: &std::path::Path) -> Vec<std::path::PathBuf> {
    fs_err::read_dir(base)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect()
}

/// Returns the command lines of this machine's processes that hold `text`.
pub(crate) fn processes_naming(text: &str) -> Vec<String> {
    fs_err::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let line = fs_err::read(entry.ok()?.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains(text).then_some(line)
        })
        .collect()
}

pub(super) fn runsc() -> Scene<RunscBackend> {
    let base = tempfile::tempdir().unwrap();
    let options = RunscOptions {
        folder: Some(base.path().to_owned()),
        ..RunscOptions::default()
    };
    let backend = RunscBackend::open(&options)
        .unwrap_or_else(|error| panic!("{error}\nhint: apt-get install -y runsc"));
    Scene {
        backend: Some(backend),
        base,
    }
}

pub(crate) fn spec() -> ActorSpec {
    ActorSpec {
        limits: ActorLimits {
            memory: 192 << 20,
            disk: 64 << 20,
            cpu_millis: 1000,
            processes: 64,
            open_files: 256,
            lifetime: Duration::from_secs(120),
        },
        ..ActorSpec::new(RootFs::Host)
    }
}

pub(crate) fn sh(actor: &dyn Actor, script: &str) -> ActorOutput {
    actor.exec(&ActorCommand::shell(script)).unwrap()
}

/// Runs a script that must succeed, and returns what it printed.
pub(crate) fn text(actor: &dyn Actor, script: &str) -> String {
    let output = sh(actor, script);
    assert!(output.is_success(), "{script}: {output:?}");
    output.stdout.text().trim_end().to_owned()
}

pub(super) use openenv_actors::openenv;
pub(super) use sandboxd::sandboxd;

pub(super) fn bwrap() -> Scene<BwrapBackend> {
    let base = tempfile::tempdir().unwrap();
    // Actors of root are other users, who must get through.
    let passable = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    fs_err::set_permissions(base.path(), passable).unwrap();
    let backend = BwrapBackend::open(Some(base.path()))
        .unwrap_or_else(|error| panic!("{error}\nhint: apt-get install -y bubblewrap"));
    Scene {
        backend: Some(backend),
        base,
    }
}

/// What an actor runs is in a control group that holds it back or, where none can be made, bound to a processor.
pub(super) fn assert_cpu_time_is_bounded<B: ActorBackend>(scene: &Scene<B>) {
    let mut spec = spec();
    spec.limits.cpu_millis = 300;
    let actor = scene.backend().create(&spec).unwrap();
    let base = scene.base.path().to_string_lossy().into_owned();
    let command = ActorCommand::shell("sleep 5");
    let is_held_back = || {
        let entries = fs_err::read_dir("/proc").unwrap().flatten();
        let mut processes = entries.map(|entry| entry.path()).filter(|path| {
            let line = fs_err::read(path.join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&base)
        });
        processes.any(|path| {
            let read = |name: &str| fs_err::read_to_string(path.join(name)).unwrap_or_default();
            let groups = read("cgroup");
            let group = groups.lines().find(|line| line.contains("/wardian-"));
            let Some(group) = group.and_then(|line| line.splitn(3, ':').nth(2)) else {
                let status = read("status");
                let bound = status
                    .lines()
                    .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
                let bound = bound.unwrap_or_default().trim();
                return !bound.is_empty() && bound.bytes().all(|byte| byte.is_ascii_digit());
            };
            // Either version's: 30 ms of every 100 ms.
            let limit = |name: String| {
                let path = format!("/sys/fs/cgroup{name}");
                fs_err::read_to_string(path).unwrap_or_default()
            };
            limit(format!("/cpu{group}/cpu.cfs_quota_us")).trim() == "30000"
                || limit(format!("{group}/cpu.max")).starts_with("30000 ")
        })
    };
    std::thread::scope(|scope| {
        let running = scope.spawn(|| actor.exec(&command).unwrap());
        let mut was_held_back = false;
        while !running.is_finished() && !was_held_back {
            was_held_back = is_held_back();
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(was_held_back, "{:?}", running.join());
    });
}
