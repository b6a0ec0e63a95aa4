//! From the text of a `task.toml` to a configuration: values are checked and older spellings brought
//! up to date.

use super::HarborError;
use super::checks::{self, Fault};
use super::config::{
    AgentConfig, EnvironmentConfig, NetworkMode, TaskConfig, VerifierConfig, VerifierMode,
};

impl TaskConfig {
    /// Reads the text of a `task.toml`; also returns what in it is out of date.
    ///
    /// # Errors
    ///
    /// Fails where it is not TOML, a value has another type, or Harbor would refuse it.
    pub fn parse(text: &str) -> Result<(Self, Vec<String>), HarborError> {
        let mut config: Self = toml::from_str(text)?;
        if let Some(version) = config.version.take()
            && !text_has_schema_version(text)
        {
            config.schema_version = version;
        }
        let mut warnings = Vec::new();
        config
            .settle(&mut warnings)
            .map_err(|Fault { key, reason }| HarborError::Value { key, reason })?;
        Ok((config, warnings))
    }

    /// Checks every value and brings older spellings up to date.
    fn settle(&mut self, warnings: &mut Vec<String>) -> Result<(), Fault> {
        if let Some(task) = &self.task {
            checks::package_name("task.name", &task.name)?;
            if task.version.as_deref() == Some("") {
                return Err(Fault::new("task.version", "is empty"));
            }
        }
        self.environment.settle("environment", warnings)?;
        self.agent.settle("agent")?;
        self.verifier.settle("verifier", warnings)?;
        checks::artifacts("artifacts", &mut self.artifacts)?;
        let mut names = std::collections::HashSet::new();
        for (index, step) in self.steps.iter_mut().flatten().enumerate() {
            let key = format!("steps[{index}]");
            checks::step_name(&format!("{key}.name"), &step.name)?;
            if !names.insert(step.name.to_lowercase()) {
                return Err(Fault::new(
                    "steps",
                    format!("have two of the name `{}`, case aside", step.name),
                ));
            }
            step.agent.settle(&format!("{key}.agent"))?;
            step.verifier.settle(&format!("{key}.verifier"), warnings)?;
            checks::artifacts(&format!("{key}.artifacts"), &mut step.artifacts)?;
        }
        Ok(())
    }
}

/// Whether the file gives `schema_version`, which then counts for more than `version`.
fn text_has_schema_version(text: &str) -> bool {
    text.parse::<toml::Table>()
        .is_ok_and(|table| table.contains_key("schema_version"))
}

impl AgentConfig {
    fn settle(&mut self, key: &str) -> Result<(), Fault> {
        checks::network(key, self.network_mode, &mut self.allowed_hosts)
    }
}

impl VerifierConfig {
    fn settle(&mut self, key: &str, warnings: &mut Vec<String>) -> Result<(), Fault> {
        checks::network(key, self.network_mode, &mut self.allowed_hosts)?;
        if let Some(environment) = &mut self.environment {
            environment.settle(&format!("{key}.environment"), warnings)?;
            if self.environment_mode == Some(VerifierMode::Shared) {
                return Err(Fault::new(
                    format!("{key}.environment_mode"),
                    "is `shared`, which leaves no room for `environment`; drop one of the two",
                ));
            }
        }
        for (index, hook) in self.collect.iter_mut().enumerate() {
            let key = format!("{key}.collect[{index}].service");
            hook.service = checks::service(&key, &hook.service)?;
        }
        Ok(())
    }
}

impl EnvironmentConfig {
    fn settle(&mut self, key: &str, warnings: &mut Vec<String>) -> Result<(), Fault> {
        if self.allow_internet.is_some() {
            warnings.push(
                "The 'allow_internet' field is deprecated. Use [environment].network_mode instead."
                    .to_owned(),
            );
        }
        for (name, old, new) in [
            ("memory", self.memory.take(), &mut self.memory_mb),
            ("storage", self.storage.take(), &mut self.storage_mb),
        ] {
            let Some(old) = old else { continue };
            warnings.push(format!(
                "The '{name}' field is deprecated. Use '{name}_mb' instead."
            ));
            let toml::Value::String(size) = old else {
                continue; // Harbor reads only text and drops anything else
            };
            let size = checks::mebibytes(&format!("{key}.{name}"), &size)?;
            if new.is_some_and(|given| given != size) {
                return Err(Fault::new(
                    format!("{key}.{name}"),
                    format!("says {size} MiB and `{name}_mb` something else; drop `{name}`"),
                ));
            }
            *new = Some(size);
        }
        if self.cpus.is_some_and(|cpus| !cpus.is_finite()) {
            return Err(Fault::new(format!("{key}.cpus"), "is not a finite number"));
        }
        checks::network(
            key,
            self.network_mode.or(Some(NetworkMode::Public)),
            &mut self.allowed_hosts,
        )?;
        let open = self.allow_internet.take();
        self.network_mode = Some(match (self.network_mode, open) {
            (Some(mode), _) => mode,
            (None, Some(false)) if self.allowed_hosts.is_none() => NetworkMode::NoNetwork,
            _ => NetworkMode::Public,
        });
        if let Some(tpu) = &mut self.tpu {
            checks::topology(&format!("{key}.tpu"), tpu)?;
        }
        for (index, server) in self.mcp_servers.iter_mut().enumerate() {
            checks::mcp_server(&format!("{key}.mcp_servers[{index}]"), server)?;
        }
        Ok(())
    }
}
