//! Actors at servers of OpenEnv's protocol: `wardian sandboxd` as the first process of namespaces of its own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use wardian::actor::escalation::Needs;
use wardian::actor::{
    Actor, ActorBackend, ActorCommand, ActorError, ActorOutput, ActorSnapshot, ActorSpec,
    Capabilities, Ending, FileTree, Isolation, RootFs, TreeLimits,
};
use wardian::config::RunConfig;
use wardian::openenv::client::RemoteConfig;
use wardian::openenv::client::actors::{OpenEnvBackend, OpenEnvOptions};
use wardian::run::{OpenedBackend, open_backend};

use super::sandboxd::{Machine, Machines, TOKEN};
use super::{Scene, sh, spec, text};

/// Starts a machine for each actor.
#[derive(Debug)]
pub(crate) struct Servers {
    machines: Machines,
    /// Is like all of them.
    first: Machine,
}

pub(crate) fn openenv() -> Scene<Servers> {
    let base = tempfile::tempdir().unwrap();
    let machines = Machines::new(base.path());
    let first = machines.start();
    Scene {
        backend: Some(Servers { machines, first }),
        base,
    }
}

fn options(machine: &Machine) -> OpenEnvOptions {
    OpenEnvOptions::new(RemoteConfig {
        headers: [("authorization".to_owned(), format!("Bearer {TOKEN}"))].into(),
        retry_timeout: Duration::from_secs(20),
        ..RemoteConfig::new(format!("http://{}", machine.address))
    })
}

fn open(machine: &Machine) -> OpenEnvBackend {
    OpenEnvBackend::open(options(machine)).unwrap()
}

/// An actor and the machine that it is in.
#[derive(Debug)]
struct Inside {
    actor: Box<dyn Actor>,
    _backend: OpenEnvBackend,
    _machine: Machine,
}

impl ActorBackend for Servers {
    fn name(&self) -> &'static str {
        "openenv"
    }

    fn capabilities(&self) -> Capabilities {
        open(&self.first).capabilities()
    }

    fn create(&self, spec: &ActorSpec) -> Result<Box<dyn Actor>, ActorError> {
        let machine = self.machines.start();
        let backend = open(&machine);
        Ok(Box::new(Inside {
            actor: backend.create(spec)?,
            _backend: backend,
            _machine: machine,
        }))
    }
}

impl Actor for Inside {
    fn id(&self) -> &str {
        self.actor.id()
    }

    fn spec(&self) -> &ActorSpec {
        self.actor.spec()
    }

    fn exec(&self, command: &ActorCommand) -> Result<ActorOutput, ActorError> {
        self.actor.exec(command)
    }

    fn put(&self, folder: &Path, tree: &FileTree) -> Result<(), ActorError> {
        self.actor.put(folder, tree)
    }

    fn get(&self, path: &Path, limits: TreeLimits) -> Result<FileTree, ActorError> {
        self.actor.get(path, limits)
    }

    fn snapshot(&self) -> Result<Arc<dyn ActorSnapshot>, ActorError> {
        self.actor.snapshot()
    }

    fn logs(&self) -> String {
        self.actor.logs()
    }

    fn destroy(self: Box<Self>) -> Result<(), ActorError> {
        let Self {
            actor,
            _backend,
            _machine,
        } = *self;
        actor.destroy()
    }
}

#[test]
fn a_session_is_an_actor_and_ends_with_it() {
    let scene = openenv();
    let backend = open(&scene.backend().first);
    let actor = backend.create(&spec()).unwrap();
    text(
        &*actor,
        "setsid sleep 1003 >/dev/null 2>&1 </dev/null & echo here > file",
    );
    let folders = "ls -d /tmp/.wardian-* 2>/dev/null | wc -l";
    assert_eq!(text(&*actor, folders), "1");
    actor.destroy().unwrap();
    // The machine is the next one's, which finds nothing of ours and nothing that runs.
    let next = backend.create(&spec()).unwrap();
    let left = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -c '^sleep' || true";
    assert_eq!(text(&*next, &format!("{folders}; {left}")), "1\n0");
    drop(next);
    drop(backend);
    scene.close();
}

#[test]
fn whose_doing_an_end_was_is_told_apart() {
    let scene = openenv();
    let machine = scene.backend().machines.start();
    let backend = open(&machine);
    let actor = backend.create(&spec()).unwrap();
    // Who kills the shell around it is killed as any other program.
    let output = sh(&*actor, "echo before; kill -9 $PPID; sleep 1000");
    assert_eq!(output.ending, Ending::Exited { code: 137 }, "{output:?}");
    assert_eq!(output.stdout.text(), "before\n");
    assert_eq!(text(&*actor, "echo on"), "on");
    // Who takes away what we work with has ended its actor.
    let output = sh(&*actor, "rm -rf /tmp/.wardian-*; touch /tmp/.wardian-x");
    let ended = sh(&*actor, "true");
    assert!(
        matches!(ended.ending, Ending::Killed { .. })
            || matches!(output.ending, Ending::Killed { .. }),
        "{output:?} {ended:?}"
    );
    drop(actor);
    // A server that is gone says nothing of the guest.
    let actor = backend.create(&spec()).unwrap();
    drop(machine);
    let error = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(matches!(error, ActorError::Lost { .. }), "{error}");
    assert!(!error.is_guests_doing());
    let again = actor.exec(&ActorCommand::new(["true"])).unwrap_err();
    assert!(matches!(again, ActorError::Lost { .. }), "{again}");
    drop(actor);
    drop(backend);
    scene.close();
}

#[test]
fn a_server_that_keeps_no_time_loses_its_session() {
    let scene = openenv();
    let backend = OpenEnvBackend::open(OpenEnvOptions {
        timeout_argument: String::new(),
        ..options(&scene.backend().first)
    });
    let backend = backend.unwrap();
    let actor = backend.create(&spec()).unwrap();
    let limit = Duration::from_millis(500);
    let command = ActorCommand {
        timeout: limit,
        ..ActorCommand::shell("sleep 1004")
    };
    for _ in 0..2 {
        assert_eq!(
            actor.exec(&command).unwrap().ending,
            Ending::TimedOut { limit }
        );
    }
    drop(actor);
    let next = backend.create(&spec()).unwrap();
    assert_eq!(text(&*next, "echo on"), "on");
    drop(next);
    drop(backend);
    scene.close();
}

#[test]
fn a_tool_that_runs_no_shell_is_named_with_its_key() {
    let scene = openenv();
    let first = &scene.backend().first;
    for (options, expected) in [
        (
            OpenEnvOptions {
                tool: "run".to_owned(),
                ..options(first)
            },
            "`actor.openenv.tool`",
        ),
        (
            OpenEnvOptions {
                argument: "line".to_owned(),
                ..options(first)
            },
            "`actor.openenv.argument`",
        ),
        (
            OpenEnvOptions {
                arguments: serde_json::Map::from_iter([("max_output".to_owned(), 2000.into())]),
                ..options(first)
            },
            "`actor.openenv.max_output`",
        ),
    ] {
        let backend = OpenEnvBackend::open(options).unwrap();
        let error = backend.create(&spec()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(!error.is_guests_doing());
    }
    // The action itself may take the line.
    let bare = OpenEnvOptions {
        tool: String::new(),
        output: Some("stdout".to_owned()),
        ..options(first)
    };
    let backend = OpenEnvBackend::open(bare).unwrap();
    let actor = backend.create(&spec()).unwrap();
    assert_eq!(text(&*actor, "echo bare"), "bare");
    drop(actor);
    let image = ActorSpec {
        root: RootFs::Image("python:3".to_owned()),
        ..spec()
    };
    let error = backend.create(&image).unwrap_err();
    assert!(
        error.to_string().contains("`actor.openenv.image_argument`"),
        "{error}"
    );
    let nobody = OpenEnvOptions::new(RemoteConfig {
        retry_timeout: Duration::ZERO,
        ..RemoteConfig::new(format!("http://{}", first.address))
    });
    let error = OpenEnvBackend::open(nobody).unwrap_err();
    assert!(error.to_string().contains("401"), "{error}");
    drop(backend);
    scene.close();
}

#[test]
fn a_run_file_names_the_servers_and_answers_for_them() {
    let scene = openenv();
    let config = |more: &str| {
        let url = scene.backend().first.address;
        let text = format!(
            "model.path = 'm'\ntask.path = 't'\n[actor]\nbackend = 'openenv'\nroot = 'host'\n[actor.openenv]\n\
             url = 'http://{url}'\nheaders = {{ authorization = 'Bearer {TOKEN}' }}\n{more}"
        );
        RunConfig::from_toml::<&str>(&text, &[]).unwrap().actor
    };
    let needs = Needs {
        shell: true,
        ..Needs::default()
    };
    let OpenedBackend { backend, why, .. } = open_backend(&config(""), &needs, 1).unwrap();
    assert_eq!(backend.capabilities().isolation, Isolation::Namespaces);
    assert!(why.contains("namespaces"), "{why}");
    let actor = backend.create(&spec()).unwrap();
    assert_eq!(text(&*actor, "echo run"), "run");
    drop(actor);
    let OpenedBackend { backend, .. } =
        open_backend(&config("isolation = 'gvisor'"), &needs, 1).unwrap();
    assert_eq!(backend.capabilities().isolation, Isolation::UserKernel);
    drop(backend);
    scene.close();
}
