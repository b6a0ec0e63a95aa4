//! What a part of a task gives its verifier.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use indexmap::IndexMap;

use super::HarborError;
use super::config::{TaskConfig, User};
use super::layout::HarborPart;
use crate::grader::{GradingFile, VerifyJob};

/// The most bytes of the tests of one part.
const MAX_TEST_BYTES: u64 = 256 << 20;

impl HarborPart {
    /// Prepares the verifier of this part of the task with `config`; who it [runs as](Self::verifier_user) is
    /// still to be found in its sandbox.
    ///
    /// `lookup` finds variables of the host, which a value `${NAME}` or `${NAME:-default}` asks for.
    /// A task may ask for any: give it those that are meant for it.
    ///
    /// # Errors
    ///
    /// Fails where the tests cannot be read, and where a variable is asked for and not there.
    pub fn verify_job(
        &self,
        config: &TaskConfig,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<VerifyJob, HarborError> {
        let mut tests = IndexMap::new();
        let mut left = MAX_TEST_BYTES;
        for folder in &self.tests {
            read_files(folder, "", &mut tests, &mut left)?;
        }
        let verifier = self.step.as_ref().map(|step| &step.verifier.env);
        let mut env = IndexMap::new();
        for (name, value) in config
            .verifier
            .env
            .iter()
            .chain(verifier.into_iter().flatten())
        {
            env.insert(name.clone(), resolved("verifier", name, value, lookup)?);
        }
        let environment = config
            .verifier_environment(self.step.as_ref())
            .unwrap_or(&config.environment);
        Ok(VerifyJob {
            tests,
            script: self.test_script.clone(),
            env,
            workdir: environment.workdir.clone(),
            // Who that is in numbers the sandbox knows.
            user: None,
            // Positive and finite: the folder was checked.
            timeout: Duration::try_from_secs_f64(self.verifier_timeout_sec)
                .unwrap_or(Duration::MAX),
        })
    }
}

impl HarborPart {
    /// Returns who the agent runs as, where the task says.
    #[must_use]
    pub fn agent_user<'a>(&'a self, config: &'a TaskConfig) -> Option<&'a User> {
        let own = self.step.as_ref().and_then(|step| step.agent.user.as_ref());
        own.or(config.agent.user.as_ref())
    }

    /// Returns who the verifier runs as, where the task says.
    #[must_use]
    pub fn verifier_user<'a>(&'a self, config: &'a TaskConfig) -> Option<&'a User> {
        let own = self
            .step
            .as_ref()
            .and_then(|step| step.verifier.user.as_ref());
        own.or(config.verifier.user.as_ref())
    }
}

impl TaskConfig {
    /// Returns the variables of the reference solution; `lookup` as for [`HarborPart::verify_job`].
    ///
    /// # Errors
    ///
    /// Fails where a variable is asked for and not there.
    pub fn solution_env(
        &self,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<IndexMap<String, String>, HarborError> {
        (self.solution.env.iter())
            .map(|(name, value)| {
                let value = resolved("solution", name, value, lookup)?;
                Ok((name.clone(), value))
            })
            .collect()
    }
}

/// Puts the host's value where one is asked for.
fn resolved(
    table: &str,
    name: &str,
    value: &str,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<String, HarborError> {
    let asked = value
        .strip_prefix("${")
        .and_then(|rest| rest.strip_suffix('}'));
    let Some(asked) = asked else {
        return Ok(value.to_owned());
    };
    let (wanted, default) = match asked.split_once(":-") {
        Some((wanted, default)) => (wanted, Some(default)),
        None => (asked, None),
    };
    let is_name = wanted.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && (wanted.bytes()).all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if !is_name {
        return Ok(value.to_owned());
    }
    lookup(wanted)
        .or_else(|| default.map(str::to_owned))
        .ok_or_else(|| HarborError::Value {
            key: format!("{table}.env.{name}"),
            reason: format!("asks for the variable `{wanted}`, which is not given"),
        })
}

/// Reads the files below a folder whose links were checked, by their paths from there.
fn read_files(
    folder: &Path,
    inside: &str,
    files: &mut IndexMap<String, GradingFile>,
    left: &mut u64,
) -> Result<(), HarborError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| HarborError::Io { path, source }
    };
    let mut entries = fs_err::read_dir(folder)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .map_err(io(folder))?;
    entries.sort_by_key(fs_err::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        let Some(name) = name.to_str() else {
            return Err(HarborError::NotText { path });
        };
        let below = format!("{inside}{name}");
        if entry.file_type().map_err(io(&path))?.is_dir() {
            read_files(&path, &format!("{below}/"), files, left)?;
            continue;
        }
        if path.is_dir() {
            return Err(HarborError::Outside { path }); // a link, which may lead to what holds it
        }
        let mut content = Vec::new();
        let mut executable = false;
        fs_err::File::open(&path)
            .and_then(|file| {
                executable = file.metadata()?.permissions().mode() & 0o100 != 0;
                file.take(*left + 1).read_to_end(&mut content)
            })
            .map_err(io(&path))?;
        *left = left
            .checked_sub(content.len() as u64)
            .ok_or(HarborError::TooLarge {
                path,
                what: "bytes in the tests",
                limit: MAX_TEST_BYTES,
            })?;
        files.insert(
            below,
            GradingFile {
                content,
                executable,
            },
        );
    }
    Ok(())
}
