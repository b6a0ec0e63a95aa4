//! Programs that keep guests in: `runsc` and `bwrap`, each tried by running something in it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::Scope;
use super::finding::Finding;
use crate::actor::bwrap::BwrapBackend;
use crate::actor::runsc::{RunscBackend, RunscOptions};
use crate::actor::{ActorBackend, ActorCommand, ActorError, ActorSpec, RootFs};
use crate::causes::with_causes;
use crate::config::{ActorBackendName, AgentIsolation, OpenEnvActorConfig};
use crate::process::{self, find_program};
use crate::run::open_openenv;

/// How long a program may take to say its version, or a guest to end.
const LIMIT: Duration = Duration::from_secs(20);
/// What is kept of its output.
const MAX_OUTPUT: usize = 4 << 10;

pub(super) fn check(scope: &Scope) -> Vec<Finding> {
    let config = &scope.config;
    let backend = config.actor.backend;
    let wants = |name| scope.needs_actors && backend == name;
    // `auto` takes nothing weaker than gVisor.
    let runsc = wants(ActorBackendName::Runsc) || wants(ActorBackendName::Auto);
    let agent = config.rollout.agent.as_ref();
    let has_agent = agent.is_some_and(|agent| agent.isolation == AgentIsolation::Bubblewrap);
    let bwrap = wants(ActorBackendName::Bwrap) || scope.has_run && has_agent;
    let mut findings = Vec::new();
    if runsc || !scope.has_run {
        findings.push(judge("runsc", "apt-get install runsc", runsc, || {
            Ok(Box::new(RunscBackend::open(&RunscOptions::default())?))
        }));
    }
    if bwrap || !scope.has_run {
        findings.push(judge(
            "bwrap",
            "apt-get install bubblewrap util-linux",
            bwrap,
            || Ok(Box::new(BwrapBackend::open(None)?)),
        ));
    }
    if wants(ActorBackendName::Openenv) {
        findings.push(openenv(config.actor.openenv.as_ref()));
    }
    let is_local = runsc || wants(ActorBackendName::Bwrap);
    if is_local && config.actor.image_build.is_some() {
        findings.push(builder());
    }
    if let Some(agent) = agent.filter(|_| scope.has_run) {
        findings.extend(agent_program(&agent.command));
    }
    findings
}

/// Asks the first server, and no longer than that: a session of it may be somebody's.
fn openenv(config: Option<&OpenEnvActorConfig>) -> Finding {
    let asked = config.map(|config| OpenEnvActorConfig {
        connect_timeout: config.connect_timeout.min(LIMIT / 2),
        reset_timeout: config.reset_timeout.min(LIMIT / 2),
        retry_timeout: Duration::ZERO,
        ..config.clone()
    });
    match open_openenv(asked.as_ref()) {
        Ok(_) => Finding::fine(
            "actors",
            "the server of `actor.openenv` answers; no machine was tried",
        ),
        Err(error) => Finding::wrong(
            "actors",
            with_causes(&error),
            "start it (`wardian sandboxd`), or correct `actor.openenv.url` and `headers`",
        ),
    }
}

/// Looks for what builds the images of tasks on this machine.
fn builder() -> Finding {
    match find_program(Path::new("buildah")) {
        Some(path) => {
            let version = version(&path).unwrap_or_else(|| "of an unknown version".to_owned());
            Finding::fine(
                "actors",
                format!("`buildah` ({version}) is there to build images"),
            )
        }
        None => Finding::missing(
            "actors",
            true,
            "`buildah` is not in `PATH`, and `actor.image_build` asks for it".to_owned(),
            "apt-get install --no-install-recommends buildah",
        ),
    }
}

/// Looks for an agent's program, and for the files that its arguments seem to name.
fn agent_program(command: &[String]) -> Vec<Finding> {
    let Some((program, arguments)) = command.split_first() else {
        return Vec::new();
    };
    let mut findings = vec![match find_program(Path::new(program)) {
        Some(_) => Finding::fine(
            "actors",
            format!("the agent's program `{program}` is there"),
        ),
        None => Finding::wrong(
            "actors",
            format!("the agent's program `{program}` is no file and not in `PATH`"),
            "correct `rollout.agent.command`, or install the program",
        ),
    }];
    // A path, or a script beside the run.
    let is_file = |argument: &&String| {
        let is_script = [".py", ".sh", ".js", ".rb"]
            .iter()
            .any(|end| argument.ends_with(end));
        !argument.starts_with('-')
            && !argument.contains("://")
            && (is_script || argument.contains('/'))
    };
    let files = arguments.iter().filter(is_file);
    let absent = files.filter(|file| !Path::new(file).exists());
    findings.extend(absent.map(|file| {
        let is_script = Path::new(file).extension().is_some();
        let about = format!("there is no `{file}` here, which `rollout.agent.command` names");
        Finding::missing(
            "actors",
            is_script,
            about,
            "start from the folder that holds it, or give its whole path",
        )
    }));
    findings
}

/// Looks for a program, opens its backend and runs `true` in it with the programs of this machine.
fn judge(
    program: &'static str,
    install: &'static str,
    is_needed: bool,
    open: impl FnOnce() -> Result<Box<dyn ActorBackend>, ActorError>,
) -> Finding {
    let Some(path) = find_program(Path::new(program)) else {
        let about = format!("`{program}` is not in `PATH`: tasks that need it cannot be run");
        return Finding::missing("actors", is_needed, about, install);
    };
    let version = version(&path).unwrap_or_else(|| "of an unknown version".to_owned());
    match open().and_then(|backend| try_out(&*backend)) {
        Ok(()) => Finding::fine("actors", format!("`{program}` ({version}) runs programs")),
        Err(error) => {
            let about = format!(
                "`{program}` ({version}) runs no programs: {}",
                with_causes(&error)
            );
            Finding::missing("actors", is_needed, about, remedy(program, &error, install))
        }
    }
}

/// Returns what it prints first when asked for its version.
fn version(program: &Path) -> Option<String> {
    let mut command = Command::new(program);
    command.arg("--version");
    let finished = process::run(&mut command, &[], LIMIT, MAX_OUTPUT, |_| false, |_| ()).ok()?;
    let said = finished.stdout.text();
    Some(said.lines().next()?.trim().to_owned())
}

fn try_out(backend: &dyn ActorBackend) -> Result<(), ActorError> {
    let actor = backend.create(&ActorSpec::new(RootFs::Host))?;
    let output = actor.exec(&ActorCommand {
        timeout: LIMIT,
        ..ActorCommand::new(["true"])
    })?;
    match output.code() {
        Some(0) => Ok(()),
        _ => Err(ActorError::Backend {
            activity: "running `true` in it".to_owned(),
            message: format!("{:?}: {}", output.ending, output.stderr.text().trim()),
        }),
    }
}

fn remedy(program: &str, error: &ActorError, install: &str) -> String {
    let is_root = rustix::process::geteuid().is_root();
    match error {
        ActorError::NotInstalled { remedy, .. } => (*remedy).to_owned(),
        _ if program == "runsc" && !is_root => {
            "run `wardian` as root: `sudo --preserve-env wardian …`, or take `actor.backend = \"bwrap\"` for \
             tasks that you trust"
                .to_owned()
        }
        _ if program == "runsc" => format!(
            "a container needs `--privileged`, or the rights to mount and to trace (SYS_ADMIN, SYS_PTRACE); \
             {install} brings another version"
        ),
        _ => format!(
            "allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1 \
             kernel.apparmor_restrict_unprivileged_userns=0, and no seccomp profile around a container; \
             {install} brings another version"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    #[test]
    fn a_program_that_is_not_there_is_wrong_for_who_needs_it() {
        let look = |is_needed| {
            judge("no-such-program", "apt-get install it", is_needed, || {
                panic!("it is not there to be opened")
            })
        };
        assert_eq!(look(true).state, State::Wrong);
        assert_eq!(look(false).state, State::Note);
        assert_eq!(look(false).fix.as_deref(), Some("apt-get install it"));
    }

    #[test]
    fn an_agent_that_is_not_there_is_wrong_and_so_may_be_its_files() {
        let look = |command: &[&str]| {
            let command: Vec<String> = command.iter().map(|&word| word.to_owned()).collect();
            let found = agent_program(&command);
            found
                .iter()
                .map(|finding| finding.state)
                .collect::<Vec<_>>()
        };
        assert_eq!(look(&["no-such-agent"]), [State::Wrong]);
        assert_eq!(look(&["sh", "-c", "x"]), [State::Fine]);
        assert_eq!(
            look(&["sh", "no/such", "http://a/b"]),
            [State::Fine, State::Note]
        );
        // Scripts beside the run are started by nearly every agent.
        assert_eq!(
            look(&["sh", "no-such.py", "--of.py", "no/such.sh"]),
            [State::Fine, State::Wrong, State::Wrong]
        );
    }

    #[test]
    fn a_backend_that_fails_says_why_and_what_helps() {
        // `sh` is everywhere, and stands for a program that is there.
        let found = judge("sh", "apt-get install it", true, || {
            Err(ActorError::Unusable {
                backend: "sh",
                reason: "needs another kernel".to_owned(),
            })
        });
        assert_eq!(found.state, State::Wrong);
        assert!(found.about.contains("needs another kernel"), "{found:?}");
        assert!(found.fix.unwrap().contains("apt-get install it"));
    }
}
