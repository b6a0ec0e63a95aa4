//! A task's folder: what has to be in it, and what is taken from it.
//!
//! ```text
//! task.toml
//! instruction.md          or steps/NAME/instruction.md
//! environment/Dockerfile  unless the configuration names an image
//! tests/test.sh           or steps/NAME/tests/test.sh; brought to /tests after the agent is done
//! solution/solve.sh       where there is a reference solution
//! ```
//!
//! Nothing is followed out of the folder, and everything is bounded before it is read.

use std::collections::HashMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::HarborError;
use super::config::{
    Artifact, EnvironmentConfig, MAX_CONFIG_BYTES, StepConfig, TaskConfig, TaskOs, VerifierMode,
};

/// The largest instruction that is read.
const MAX_INSTRUCTION_BYTES: u64 = 1 << 20;

/// The most files and folders of one task.
const MAX_ENTRIES: u64 = 20_000;

/// The most tasks of one data set.
const MAX_TASKS: usize = 100_000;

/// A task, as its folder says.
#[derive(Debug, Clone, PartialEq)]
pub struct HarborTask {
    /// The folder.
    pub folder: PathBuf,
    /// The name in the registry, or that of the folder.
    pub name: String,
    /// The configuration.
    pub config: TaskConfig,
    /// What in the configuration is out of date.
    pub warnings: Vec<String>,
    /// What is asked, in order: one part, or one for each step.
    pub parts: Vec<HarborPart>,
}

/// One thing that is asked and judged: the task, or a step of it.
#[derive(Debug, Clone, PartialEq)]
pub struct HarborPart {
    /// The step; none where the task has no steps.
    pub step: Option<StepConfig>,
    /// What the agent is asked, without the marks that betray a benchmark in training data.
    pub instruction: String,
    /// Folders brought to `/tests`, a later one over an earlier; none where the verifier's image
    /// holds the tests.
    pub tests: Vec<PathBuf>,
    /// The script that judges, in the sandbox.
    pub test_script: String,
    /// The folder of the reference solution, where there is one.
    pub solution: Option<PathBuf>,
    /// The folder brought to the working folder before the agent starts.
    pub workdir: Option<PathBuf>,
    /// Where the verifier runs.
    pub verifier_mode: VerifierMode,
    /// Seconds that the agent has; no limit of its own where none.
    pub agent_timeout_sec: Option<f64>,
    /// Seconds that the verifier has.
    pub verifier_timeout_sec: f64,
}

impl HarborTask {
    /// Reads the task in `folder`.
    ///
    /// # Errors
    ///
    /// Fails where the configuration is refused, where a file that it needs is missing, where a
    /// link leads out of the folder, and where no sandbox of ours could run it.
    pub fn read(folder: &Path) -> Result<Self, HarborError> {
        let path = folder.join("task.toml");
        let text = read_text(&path, MAX_CONFIG_BYTES)?;
        let (config, warnings) =
            TaskConfig::parse(&text).map_err(|source| HarborError::Config {
                path,
                source: Box::new(source),
            })?;
        check_runnable(folder, &config)?;
        check_tree(folder)?;
        if config.environment.docker_image.is_none() && !folder.join("environment").is_dir() {
            return Err(HarborError::Missing {
                folder: folder.to_owned(),
                missing: "environment/".to_owned(),
                remedy: "add it with a `Dockerfile`, or name an image in \
                         `environment.docker_image`",
            });
        }
        let parts = match config.steps.as_deref() {
            None | Some([]) => vec![read_part(folder, &config, None)?],
            Some(steps) => (steps.iter())
                .map(|step| read_part(folder, &config, Some(step)))
                .collect::<Result<_, _>>()?,
        };
        let own_name = || {
            folder
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
        };
        let name = (config.task.as_ref())
            .map(|task| task.name.clone())
            .or_else(own_name)
            .unwrap_or_default();
        Ok(Self {
            folder: folder.to_owned(),
            name,
            config,
            warnings,
            parts,
        })
    }

    /// Reads every task in a folder of task folders, in name order; or the one task that it is.
    ///
    /// Each is a task or why it is none, so that one bad folder does not hide the others.
    ///
    /// # Errors
    ///
    /// Fails where the folder cannot be listed, holds no task, or two of the same name.
    pub fn read_all(folder: &Path) -> Result<Vec<Result<Self, HarborError>>, HarborError> {
        if folder.join("task.toml").is_file() {
            return Ok(vec![Self::read(folder)]);
        }
        let mut folders: Vec<PathBuf> = entries(folder)?
            .into_iter()
            .filter(|path| path.join("task.toml").is_file())
            .collect();
        folders.sort();
        if folders.is_empty() {
            return Err(HarborError::NoTasks {
                path: folder.to_owned(),
            });
        }
        if folders.len() > MAX_TASKS {
            return Err(HarborError::TooLarge {
                path: folder.to_owned(),
                what: "tasks",
                limit: MAX_TASKS as u64,
            });
        }
        let mut seen: HashMap<String, PathBuf> = HashMap::new();
        let mut tasks = Vec::new();
        for path in folders {
            let task = Self::read(&path);
            if let Ok(task) = &task
                && let Some(first) = seen.insert(task.name.clone(), path.clone())
            {
                return Err(HarborError::SameName {
                    name: task.name.clone(),
                    first,
                    second: path,
                });
            }
            tasks.push(task);
        }
        Ok(tasks)
    }
}

/// Refuses what no tier runs, before anything is started for it.
fn check_runnable(folder: &Path, config: &TaskConfig) -> Result<(), HarborError> {
    let refuse = |reason: String| {
        Err(HarborError::Unsupported {
            folder: folder.to_owned(),
            reason,
        })
    };
    let known = ["1.0", "1.1", "1.2", "1.3", "1.4"];
    if !known.contains(&config.schema_version.as_str()) {
        let version = &config.schema_version;
        return refuse(format!(
            "its schema `{version}` is none of 1.0 to 1.4; convert it to one of them"
        ));
    }
    let steps = config.steps.as_deref().unwrap_or_default();
    let services = services(config).find(|service| *service != "main");
    if services.is_some() || folder.join("environment/docker-compose.yaml").is_file() {
        return refuse("it asks for several containers, and a sandbox here is one".to_owned());
    }
    let verifiers = steps
        .iter()
        .map(|step| &step.verifier)
        .chain([&config.verifier]);
    let agents = steps.iter().map(|step| &step.agent).chain([&config.agent]);
    let is_time = |seconds: f64| seconds > 0.0 && seconds.is_finite();
    let times = verifiers.map(|verifier| Some(verifier.timeout_sec));
    for seconds in times.chain(agents.map(|agent| agent.timeout_sec)).flatten() {
        if !is_time(seconds) {
            return refuse(format!("a timeout of {seconds} s ends it before it starts"));
        }
    }
    for environment in environments(config) {
        if environment.os == TaskOs::Windows {
            return refuse("it asks for Windows, and every sandbox here is Linux".to_owned());
        }
        for (name, amount) in [
            ("memory_mb", environment.memory_mb),
            ("storage_mb", environment.storage_mb),
        ] {
            if amount.is_some_and(|amount| amount <= 0) {
                return refuse(format!("`environment.{name}` is not above 0"));
            }
        }
        if environment.cpus.is_some_and(|cpus| cpus <= 0.0) {
            return refuse("`environment.cpus` is not above 0".to_owned());
        }
    }
    Ok(())
}

/// Returns the services that something is taken from or run in.
fn services(config: &TaskConfig) -> impl Iterator<Item = &str> {
    let steps = || config.steps.iter().flatten();
    let verifiers = steps().map(|step| &step.verifier).chain([&config.verifier]);
    let hooks = verifiers.flat_map(|verifier| &verifier.collect);
    let artifacts = steps()
        .flat_map(|step| &step.artifacts)
        .chain(&config.artifacts);
    hooks
        .map(|hook| hook.service.as_str())
        .chain(artifacts.filter_map(Artifact::service))
}

fn environments(config: &TaskConfig) -> impl Iterator<Item = &EnvironmentConfig> {
    let steps = config.steps.iter().flatten().map(|step| &step.verifier);
    let verifiers = steps.chain([&config.verifier]);
    verifiers
        .filter_map(|verifier| verifier.environment.as_ref())
        .chain([&config.environment])
}

fn read_part(
    folder: &Path,
    config: &TaskConfig,
    step: Option<&StepConfig>,
) -> Result<HarborPart, HarborError> {
    let root = match step {
        Some(step) => folder.join("steps").join(&step.name),
        None => folder.to_owned(),
    };
    let shown = |path: &Path| {
        let inside = path.strip_prefix(folder).unwrap_or(path);
        inside.display().to_string()
    };
    let instruction_path = root.join("instruction.md");
    if !instruction_path.is_file() {
        return Err(HarborError::Missing {
            folder: folder.to_owned(),
            missing: shown(&instruction_path),
            remedy: "write down what the agent is asked",
        });
    }
    let instruction = read_text(&instruction_path, MAX_INSTRUCTION_BYTES)?;
    let is_bundled = is_test_image(folder, config, step);
    let places: Vec<PathBuf> = if step.is_some() {
        vec![folder.join("tests"), root.join("tests")]
    } else {
        vec![root.join("tests")]
    };
    let has_script = |place: &PathBuf| place.join("test.sh").is_file();
    if !is_bundled && !places.iter().any(has_script) {
        return Err(HarborError::Missing {
            folder: folder.to_owned(),
            missing: shown(&root.join("tests").join("test.sh")),
            remedy: "add the script that judges the task",
        });
    }
    let folder_of = |name: &str| Some(root.join(name)).filter(|path| path.is_dir());
    Ok(HarborPart {
        step: step.cloned(),
        instruction: without_canary(&instruction).to_owned(),
        tests: if is_bundled {
            Vec::new()
        } else {
            places.into_iter().filter(|place| place.is_dir()).collect()
        },
        test_script: "/tests/test.sh".to_owned(),
        solution: folder_of("solution"),
        workdir: step.and_then(|_| folder_of("workdir")),
        verifier_mode: config.verifier_mode(step),
        agent_timeout_sec: step
            .and_then(|step| step.agent.timeout_sec)
            .or(config.agent.timeout_sec),
        verifier_timeout_sec: step
            .map_or(&config.verifier, |step| &step.verifier)
            .timeout_sec,
    })
}

/// Whether the image of a separate verifier is made of the tests, so that it holds them.
fn is_test_image(folder: &Path, config: &TaskConfig, step: Option<&StepConfig>) -> bool {
    if config.verifier_environment(step).is_none() {
        return false;
    }
    let of_step = step.map(|step| {
        let tests = folder.join("steps").join(&step.name).join("tests");
        (step.verifier.environment.as_ref(), tests)
    });
    let of_task = (config.verifier.environment.as_ref(), folder.join("tests"));
    of_step
        .into_iter()
        .chain([of_task])
        .any(|(environment, tests)| {
            environment.is_some_and(|environment| environment.docker_image.is_some())
                || ["Dockerfile", "docker-compose.yaml"]
                    .iter()
                    .any(|name| tests.join(name).is_file())
        })
}

/// Leaves out the marks at the start by which benchmarks are found again in training data.
fn without_canary(text: &str) -> &str {
    let mut rest = text;
    let mut in_marks = true;
    while let Some((line, after)) = rest.split_once('\n') {
        let line = line.trim().to_ascii_lowercase();
        let is_comment = line.starts_with('#') || line.starts_with("<!--") && line.ends_with("-->");
        let is_mark = in_marks && is_comment && line.contains("canary");
        if !is_mark && !line.is_empty() {
            break;
        }
        in_marks = is_mark;
        rest = after;
    }
    rest
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, HarborError> {
    fs_err::read_dir(folder)
        .and_then(|entries| {
            entries
                .map(|entry| entry.map(|entry| entry.path()))
                .collect()
        })
        .map_err(|source| HarborError::Io {
            path: folder.to_owned(),
            source,
        })
}

/// Refuses links that lead out of `root`, what is no file, and folders with too much in them.
pub(super) fn check_tree(root: &Path) -> Result<(), HarborError> {
    let io = |path: &Path, source| HarborError::Io {
        path: path.to_owned(),
        source,
    };
    let real_root = fs_err::canonicalize(root).map_err(|source| io(root, source))?;
    let mut folders = vec![root.to_owned()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for path in entries(&folder)? {
            seen += 1;
            if seen > MAX_ENTRIES {
                return Err(HarborError::TooLarge {
                    path: root.to_owned(),
                    what: "files and folders",
                    limit: MAX_ENTRIES,
                });
            }
            let kind = fs_err::symlink_metadata(&path).map_err(|source| io(&path, source))?;
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_symlink() {
                let is_inside =
                    fs_err::canonicalize(&path).is_ok_and(|target| target.starts_with(&real_root));
                if !is_inside {
                    return Err(HarborError::Outside { path });
                }
            } else if !kind.is_file() {
                // A pipe is opened when somebody writes to it, which may be never.
                return Err(HarborError::Special { path });
            }
        }
    }
    Ok(())
}

fn read_text(path: &Path, limit: u64) -> Result<String, HarborError> {
    let mut bytes = Vec::new();
    fs_err::File::open(path)
        .and_then(|file| file.take(limit + 1).read_to_end(&mut bytes))
        .map_err(|source| HarborError::Io {
            path: path.to_owned(),
            source,
        })?;
    if bytes.len() as u64 > limit {
        return Err(HarborError::TooLarge {
            path: path.to_owned(),
            what: "bytes",
            limit,
        });
    }
    String::from_utf8(bytes).map_err(|_| HarborError::NotText {
        path: path.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_at_the_start_are_left_out_with_the_blank_lines_after_them() {
        let text = "<!-- harbor-canary GUID 1 -->\n# Canary: 2\n\n\n# Do it\ncanary\n";
        assert_eq!(without_canary(text), "# Do it\ncanary\n");
        assert_eq!(without_canary("# Do it\n# canary\n"), "# Do it\n# canary\n");
        assert_eq!(without_canary(""), "");
    }
}
