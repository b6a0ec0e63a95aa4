//! Which tier a task runs in: the cheapest that gives what it needs, and none that is weaker than allowed.
//!
//! A step of Python in WebAssembly takes microseconds, an actor a tenth of a second. So a task that needs
//! nothing but Python stays there, and one that needs a shell, an image, more memory or more time goes to an
//! actor. Where no backend that is strong enough can run it, there is an error that says what to do: another
//! one is never taken in its place in silence.

use std::time::Duration;

use super::{ActorError, Capabilities, Isolation};

/// What a task asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// Processes: a shell, a compiler, `git`, a test suite.
    pub shell: bool,
    /// A network.
    pub network: bool,
    /// A root filesystem of its own.
    pub image: bool,
    /// Processes that outlive the command that started them.
    pub background: bool,
    /// To write anywhere, not only in the folders that it names.
    pub writable_root: bool,
    /// Memory, in bytes.
    pub memory: u64,
    /// How long a step may take.
    pub wall: Duration,
}

/// A backend that may be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub name: &'static str,
    /// What it can do, or why it cannot be used and what helps, as its error says.
    pub state: Result<Capabilities, String>,
}

/// What decides besides the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// The most memory that a task in WebAssembly gets, in bytes.
    pub wasm_memory: u64,
    /// The longest that a step in WebAssembly may take.
    pub wasm_wall: Duration,
    /// The weakest isolation of an actor. [`Isolation::Namespaces`] must be asked for.
    pub weakest: Isolation,
}

impl Default for Rules {
    /// 1 GiB and a minute in WebAssembly, and otherwise a kernel of its own.
    fn default() -> Self {
        Self {
            wasm_memory: 1 << 30,
            wasm_wall: Duration::from_secs(60),
            weakest: Isolation::UserKernel,
        }
    }
}

/// Where a task runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// In WebAssembly.
    Wasm,
    /// In an actor of the backend of this name.
    Actor(&'static str),
}

/// What was decided, and why, in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The tier.
    pub tier: Tier,
    /// The reason.
    pub why: String,
}

/// Decides where a task runs: in WebAssembly if that does, and otherwise in the strongest backend that can,
/// the first of those that are equally strong.
///
/// # Errors
///
/// Fails where no backend can, or only one that is weaker than the rules allow.
pub fn decide(
    needs: &Needs,
    candidates: &[Candidate],
    rules: &Rules,
) -> Result<Decision, ActorError> {
    let heavy = heavy_needs(needs, rules);
    if heavy.is_empty() {
        return Ok(Decision {
            tier: Tier::Wasm,
            why: "it needs Python alone, which WebAssembly runs".to_owned(),
        });
    }
    let heavy = heavy.join(", ");
    let mut best: Option<(&Candidate, Capabilities)> = None;
    let mut refused = Vec::new();
    let mut is_too_weak = false;
    for candidate in candidates {
        let name = candidate.name;
        match &candidate.state {
            Err(why) => refused.push(format!("`{name}` is not to be had: {why}")),
            Ok(found) => match lacking(needs, found) {
                lacking if !lacking.is_empty() => {
                    refused.push(format!("`{name}` lacks {}", lacking.join(" and ")));
                }
                _ if found.isolation < rules.weakest => {
                    is_too_weak = true;
                    refused.push(format!("`{name}` has only {}", found.isolation.describe()));
                }
                _ if best.is_none_or(|(_, other)| other.isolation < found.isolation) => {
                    best = Some((candidate, *found));
                }
                _ => {}
            },
        }
    }
    if let Some((candidate, found)) = best {
        return Ok(Decision {
            tier: Tier::Actor(candidate.name),
            why: format!(
                "it needs {heavy}; `{}` has it in {}",
                candidate.name,
                found.isolation.describe()
            ),
        });
    }
    let mut remedy = match needs.network {
        true => "take a task without a network",
        false => "install gVisor: `apt-get install runsc`",
    }
    .to_owned();
    if is_too_weak {
        remedy += ", or allow weaker isolation for tasks that you trust";
    }
    let refused = match refused.is_empty() {
        true => "there is no backend".to_owned(),
        false => refused.join(", "),
    };
    Err(ActorError::NoTier {
        reason: format!("it needs {heavy}, and {refused}"),
        remedy,
    })
}

/// Returns what WebAssembly does not give.
fn heavy_needs(needs: &Needs, rules: &Rules) -> Vec<String> {
    let mut heavy: Vec<String> = [
        (needs.shell, "a shell"),
        (needs.network, "a network"),
        (needs.image, "an image"),
        (needs.background, "background processes"),
        (needs.writable_root, "a writable root"),
    ]
    .iter()
    .filter(|(is_needed, _)| *is_needed)
    .map(|(_, name)| (*name).to_owned())
    .collect();
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
    if needs.memory > rules.wasm_memory {
        heavy.push(format!(
            "{} MiB of memory, of at most {} in WebAssembly",
            mebibytes(needs.memory),
            mebibytes(rules.wasm_memory)
        ));
    }
    if needs.wall > rules.wasm_wall {
        heavy.push(format!(
            "{} s, of at most {} in WebAssembly",
            needs.wall.as_secs_f64(),
            rules.wasm_wall.as_secs_f64()
        ));
    }
    heavy
}

/// Returns what a backend does not give.
fn lacking(needs: &Needs, found: &Capabilities) -> Vec<&'static str> {
    [
        (needs.shell && !found.shell, "a shell"),
        (needs.network && !found.network, "a network"),
        (
            needs.image && !found.root_folder && !found.image,
            "root filesystems",
        ),
        (
            needs.background && !found.background,
            "background processes",
        ),
        (
            needs.writable_root && !found.writable_root,
            "a writable root",
        ),
    ]
    .iter()
    .filter(|(is_lacking, _)| *is_lacking)
    .map(|(_, name)| *name)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capabilities(isolation: Isolation, writable_root: bool) -> Capabilities {
        Capabilities {
            isolation,
            shell: true,
            network: false,
            root_folder: true,
            image: false,
            writable_root,
            background: writable_root,
            users: writable_root,
            snapshot: true,
            snapshot_memory: writable_root,
            fork: true,
        }
    }

    fn runsc() -> Candidate {
        Candidate {
            name: "runsc",
            state: Ok(capabilities(Isolation::UserKernel, true)),
        }
    }

    fn bwrap() -> Candidate {
        Candidate {
            name: "bwrap",
            state: Ok(capabilities(Isolation::Namespaces, false)),
        }
    }

    fn missing() -> Candidate {
        Candidate {
            name: "runsc",
            state: Err("there is no `runsc` in `PATH`".to_owned()),
        }
    }

    const SHELL: Needs = Needs {
        shell: true,
        network: false,
        image: false,
        background: false,
        writable_root: false,
        memory: 1 << 20,
        wall: Duration::from_secs(1),
    };

    const WEAK: Rules = Rules {
        wasm_memory: 1 << 30,
        wasm_wall: Duration::from_secs(60),
        weakest: Isolation::Namespaces,
    };

    #[test]
    fn python_alone_stays_in_webassembly() {
        let needs = Needs {
            shell: false,
            memory: 1 << 30,
            wall: Duration::from_secs(60),
            ..SHELL
        };
        for candidates in [&[][..], &[runsc(), bwrap()]] {
            let decision = decide(&needs, candidates, &Rules::default()).unwrap();
            assert_eq!(decision.tier, Tier::Wasm);
        }
    }

    #[test]
    fn more_than_python_goes_to_the_strongest_that_can() {
        for (needs, why) in [
            (SHELL, "a shell"),
            (
                Needs {
                    shell: false,
                    memory: (1 << 30) + 1,
                    ..SHELL
                },
                "1025 MiB of memory, of at most 1024 in WebAssembly",
            ),
            (
                Needs {
                    shell: false,
                    wall: Duration::from_millis(60_500),
                    ..SHELL
                },
                "60.5 s, of at most 60 in WebAssembly",
            ),
        ] {
            let decision = decide(&needs, &[bwrap(), runsc()], &WEAK).unwrap();
            assert_eq!(decision.tier, Tier::Actor("runsc"));
            let expected = format!("it needs {why}; `runsc` has it in a kernel in user space");
            assert_eq!(decision.why, expected);
        }
        let decision = decide(&SHELL, &[missing(), bwrap()], &WEAK).unwrap();
        assert_eq!(
            decision.tier,
            Tier::Actor("bwrap"),
            "it was allowed by name"
        );
    }

    #[test]
    fn nothing_weaker_is_taken_in_silence() {
        let error = decide(&SHELL, &[missing(), bwrap()], &Rules::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no sandbox for this task: it needs a shell, and `runsc` is not to be had: there is no \
             `runsc` in `PATH`, `bwrap` has only namespaces on the host's kernel; install gVisor: \
             `apt-get install runsc`, or allow weaker isolation for tasks that you trust"
        );
        let everywhere = Needs {
            writable_root: true,
            ..SHELL
        };
        let error = decide(&everywhere, &[bwrap()], &WEAK).unwrap_err();
        assert!(
            error.to_string().contains("`bwrap` lacks a writable root"),
            "{error}"
        );
        let network = Needs {
            network: true,
            ..SHELL
        };
        let error = decide(&network, &[runsc()], &WEAK).unwrap_err();
        assert!(
            error.to_string().contains("`runsc` lacks a network"),
            "{error}"
        );
        assert!(
            error.to_string().ends_with("take a task without a network"),
            "{error}"
        );
        decide(&SHELL, &[], &WEAK).unwrap_err();
    }
}
