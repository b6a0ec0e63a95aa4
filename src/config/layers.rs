//! Reading the layers of a run's configuration and laying them over each other.

use std::io::Read as _;
use std::path::Path;

use serde::Deserialize as _;
use toml::{Table, Value};

use super::{
    ConfigError, EnvironmentConfig, ImageBuildConfig, Preset, RemoteConfig, RunConfig,
    SubstrateConfig,
};

/// The largest run file that is read; they are a few kilobytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The section whose keys are names.
const ENVIRONMENTS: &str = "environments";

impl RunConfig {
    /// Reads a run file, lays `sets` (`section.key=value`) over it and validates the result. A preset
    /// lies under the file if that names it, and over it if one of `sets` does.
    ///
    /// Without a file the defaults are laid under `sets`. A set's value is TOML, or any other text
    /// for a string without quotes.
    ///
    /// # Errors
    ///
    /// Fails when the file can not be read, or a key or a value is wrong; the error names it.
    pub fn load<S: AsRef<str>>(path: Option<&Path>, sets: &[S]) -> Result<Self, ConfigError> {
        let Some(path) = path else {
            return Self::from_layers("", "run file", sets);
        };
        let io = |source| ConfigError::Io {
            path: path.to_owned(),
            source,
        };
        let mut text = String::new();
        let file = fs_err::File::open(path).map_err(io)?;
        file.take(MAX_FILE_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(io)?;
        let (found, limit) = (text.len() as u64, MAX_FILE_BYTES);
        if found > limit {
            return Err(ConfigError::TooLarge {
                path: path.to_owned(),
                found,
                limit,
            });
        }
        Self::from_layers(&text, &format!("`{}`", path.display()), sets)
    }

    /// Does what [`RunConfig::load`] does, with the text of a run file.
    ///
    /// # Errors
    ///
    /// Fails when a key or a value is wrong; the error names it.
    pub fn from_toml<S: AsRef<str>>(text: &str, sets: &[S]) -> Result<Self, ConfigError> {
        Self::from_layers(text, "run file", sets)
    }

    fn from_layers<S: AsRef<str>>(
        text: &str,
        origin: &str,
        sets: &[S],
    ) -> Result<Self, ConfigError> {
        let syntax = |source| ConfigError::Syntax {
            origin: origin.to_owned(),
            source: Box::new(source),
        };
        let mut file: Table = text.parse().map_err(syntax)?;
        check(&file, origin)?;
        let mut over = Table::new();
        for set in sets {
            let layer = parse_set(set.as_ref())?;
            check(&layer, &format!("`--set {}`", set.as_ref()))?;
            merge(&mut over, layer);
        }
        // A preset lies right below what names it: its file, or all that is set.
        let merged = if let Some(preset) = preset_of(&over) {
            file.remove("preset");
            let preset = preset_table(preset, &[&over]).map_err(syntax)?;
            let mut merged = file;
            merge(&mut merged, preset);
            merge(&mut merged, over);
            merged
        } else {
            let mut merged = match preset_of(&file) {
                Some(preset) => preset_table(preset, &[&file, &over]).map_err(syntax)?,
                None => Table::new(),
            };
            merge(&mut merged, file);
            merge(&mut merged, over);
            merged
        };
        let config = Self::deserialize(merged).map_err(syntax)?;
        config.validate()?;
        Ok(config)
    }

    /// Returns the resolved configuration as a run file that reads back as the same run.
    ///
    /// # Errors
    ///
    /// Fails when a number is too large for TOML, which [`RunConfig::validate`] refuses.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }
}

/// Returns whether one of these `--set` names an environment.
pub fn sets_name_environments<S: AsRef<str>>(sets: &[S]) -> bool {
    let mut tables = sets.iter().filter_map(|set| parse_set(set.as_ref()).ok());
    tables.any(|table| names_environments(&table))
}

fn names_environments(layer: &Table) -> bool {
    layer.contains_key(ENVIRONMENTS)
}

impl Preset {
    /// Returns the preset that one of these `--set` names, the last one; none where it is unknown, which
    /// reading the configuration tells.
    pub fn named_in<S: AsRef<str>>(sets: &[S]) -> Option<Self> {
        let tables = sets.iter().filter_map(|set| parse_set(set.as_ref()).ok());
        tables.filter_map(|table| preset_of(&table)).last()
    }
}

fn preset_of(layer: &Table) -> Option<Preset> {
    // Checked before it is laid over anything, so what does not parse is reported.
    (layer.get("preset").cloned()).and_then(|name| Preset::deserialize(name).ok())
}

/// Returns the keys of a preset under `above`. Its splits are those of its own tasks, so where others
/// are named they do not hold, and where environments are named, its tasks do not, either.
fn preset_table(preset: Preset, above: &[&Table]) -> Result<Table, toml::de::Error> {
    let mut table: Table = preset.text().parse()?;
    let names_tasks = |layer: &&Table| {
        let task = layer.get("task").and_then(Value::as_table);
        task.is_some_and(|task| task.contains_key("path"))
    };
    let has_environments = above.iter().any(|layer| names_environments(layer));
    if (has_environments || above.iter().any(names_tasks))
        && let Some(Value::Table(task)) = table.get_mut("task")
    {
        task.remove("split");
        task.remove("eval_split");
        if has_environments {
            task.remove("path");
        }
    }
    Ok(table)
}

/// Reads `a.b=value` as a table of its own.
fn parse_set(text: &str) -> Result<Table, ConfigError> {
    let fault = || ConfigError::Set {
        text: text.to_owned(),
    };
    let (key, value) = text.split_once('=').ok_or_else(fault)?;
    let parts: Vec<&str> = key.trim().split('.').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(fault());
    }
    let value = parse_value(value.trim());
    Ok(nest(&parts, value))
}

/// Reads a TOML value; what is none is a string.
fn parse_value(text: &str) -> Value {
    let table = format!("value = {text}").parse::<Table>().ok();
    let value = table
        .filter(|table| table.len() == 1)
        .and_then(|mut table| table.remove("value"));
    value.unwrap_or_else(|| Value::String(text.to_owned()))
}

fn nest<P: AsRef<str>>(parts: &[P], value: Value) -> Table {
    let mut table = Table::new();
    if let Some((first, rest)) = parts.split_first() {
        let inner = if rest.is_empty() {
            value
        } else {
            Value::Table(nest(rest, value))
        };
        table.insert(first.as_ref().to_owned(), inner);
    }
    table
}

/// Lays `upper` over `lower`: sections are merged, values replaced.
fn merge(lower: &mut Table, upper: Table) {
    for (key, value) in upper {
        match (lower.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => merge(below, above),
            (_, value) => {
                lower.insert(key, value);
            }
        }
    }
}

/// Checks that each key of a layer is known and that its value alone can be read, so that an error
/// can name both.
fn check(layer: &Table, origin: &str) -> Result<(), ConfigError> {
    let known = Table::try_from(every_key()).map_err(|source| ConfigError::Value {
        key: "defaults".to_owned(),
        value: String::new(),
        origin: origin.to_owned(),
        problem: source.to_string(),
    })?;
    check_section(layer, &known, &known, &mut Vec::new(), origin)
}

fn check_section(
    layer: &Table,
    section: &Table,
    known: &Table,
    path: &mut Vec<String>,
    origin: &str,
) -> Result<(), ConfigError> {
    for (name, value) in layer {
        path.push(name.clone());
        let key = path.join(".");
        match (section.get(name), value) {
            (None, _) => {
                let hint = hint(name, &path[..path.len() - 1], section, known);
                return Err(ConfigError::UnknownKey {
                    key,
                    origin: origin.to_owned(),
                    hint,
                });
            }
            (Some(Value::Table(inner)), Value::Table(layer))
                if path.len() == 1 && name == ENVIRONMENTS =>
            {
                // Each name has the keys of one environment.
                let keys = inner.values().find_map(Value::as_table);
                let named = layer.keys().map(|name| (name.clone(), keys));
                let section = named
                    .filter_map(|(name, keys)| Some((name, Value::Table(keys?.clone()))))
                    .collect();
                check_section(layer, &section, known, path, origin)?;
            }
            // A section without keys of its own has the file's: names with their weights.
            (Some(Value::Table(inner)), Value::Table(layer)) if !inner.is_empty() => {
                check_section(layer, inner, known, path, origin)?;
            }
            (Some(Value::Table(inner)), _) if !inner.is_empty() => {
                let keys: Vec<&str> = inner.keys().map(String::as_str).collect();
                let keys = keys.join(", ");
                return Err(ConfigError::NotASection {
                    key,
                    origin: origin.to_owned(),
                    keys,
                });
            }
            (Some(_), value) => {
                // Every key has a default, so a file with this one key alone is complete.
                RunConfig::deserialize(nest(path, value.clone())).map_err(|error| {
                    ConfigError::Value {
                        key,
                        value: value.to_string(),
                        origin: origin.to_owned(),
                        problem: error.message().trim_end().to_owned(),
                    }
                })?;
            }
        }
        path.pop();
    }
    Ok(())
}

/// Returns a configuration with a value for every key, also for those that have none by default.
pub(super) fn every_key() -> RunConfig {
    let mut config = RunConfig {
        preset: Some(Preset::Trl),
        ..RunConfig::default()
    };
    let environment = EnvironmentConfig {
        split: Some(crate::task::Split::Train),
        eval_path: Some(String::new()),
        eval_split: Some(crate::task::Split::Test),
        visible_tests: Some(1),
        challenge_tests: Some(false),
        grader: Some(String::new()),
        limit: Some(1),
        curriculum: Some(super::Curriculum::Epochs),
        max_turns: Some(1),
        max_new_tokens: Some(1),
        system_prompt: Some(String::new()),
        tool_output: Some(bytesize::ByteSize(0)),
        fuel: Some(1),
        deadline: Some(std::time::Duration::ZERO),
        env: Some(every_key_of_remote()),
        reward: Some(crate::grader::RewardTerms::default()),
        ..EnvironmentConfig::default()
    };
    config.environments = [("NAME".to_owned(), environment)].into();
    config.env = Some(every_key_of_remote());
    config.model.revision = Some(String::new());
    config.model.adapter = Some(String::new());
    config.log.http = Some(String::new());
    config.trainer.memory_budget = Some(bytesize::ByteSize(0));
    config.task.split = Some(crate::task::Split::Train);
    config.task.eval_path = Some(String::new());
    config.task.eval_split = Some(crate::task::Split::Test);
    config.task.grader = Some(String::new());
    config.task.limit = Some(1);
    config.rollout.max_thinking_tokens = Some(1);
    config.rollout.max_step_tokens = Some(1);
    config.rollout.deadline = Some(std::time::Duration::from_secs(1));
    config.rollout.tool_call_format = Some(crate::chat::ToolCallFormat::Hermes);
    config.rollout.system_prompt = Some(String::new());
    config.rollout.agent = Some(super::AgentConfig::default());
    config.trainer.dual_clip = Some(3.0);
    config.trainer.sampler_correction_min = Some(0.0);
    config.trainer.off_policy_threshold = Some(1.0);
    config.trainer.overlong_limit = Some(1);
    config.eval.limit = Some(1);
    config.actor.root = Some(String::new());
    config.actor.image = Some(String::new());
    config.actor.kubernetes.namespace = Some(String::new());
    config.actor.kubernetes.kubeconfig = Some(std::path::PathBuf::new());
    config.actor.kubernetes.context = Some(String::new());
    config.actor.kubernetes.api_server = Some(String::new());
    config.actor.kubernetes.kruise_group = Some(String::new());
    config.actor.kubernetes.agent_sandbox_group = Some(String::new());
    config.actor.kubernetes.agent_sandbox_extensions = Some(String::new());
    config.actor.kubernetes.warm = Some(1);
    config.actor.substrate = Some(every_key_of_substrate());
    config.actor.openenv = Some(super::OpenEnvActorConfig {
        tls: Some(every_key_of_tls()),
        output: Some(String::new()),
        image_argument: Some(String::new()),
        ..super::OpenEnvActorConfig::default()
    });
    config.actor.image_build = Some(ImageBuildConfig {
        registry: Some(String::new()),
        registry_user: Some(String::new()),
        registry_password_file: Some(std::path::PathBuf::new()),
        push_secret: Some(String::new()),
        folder: Some(std::path::PathBuf::new()),
        ..ImageBuildConfig::default()
    });
    config.actor.repositories = Some(std::path::PathBuf::new());
    config
}

fn every_key_of_substrate() -> SubstrateConfig {
    SubstrateConfig {
        control: Some(String::new()),
        control_token_file: Some(std::path::PathBuf::new()),
        tls: every_key_of_tls(),
        new_templates: Some(super::TemplateConfig {
            storage_location: String::new(),
            sandbox_config: String::new(),
            sandboxd_image: Some(String::new()),
            cpu: Some(String::new()),
            worker_labels: std::collections::BTreeMap::new(),
        }),
        owner: Some(String::new()),
        ..SubstrateConfig::default()
    }
}

fn every_key_of_tls() -> super::TlsConfig {
    super::TlsConfig {
        ca: Some(std::path::PathBuf::new()),
        certificate: Some(std::path::PathBuf::new()),
        key: Some(std::path::PathBuf::new()),
    }
}

fn every_key_of_remote() -> RemoteConfig {
    RemoteConfig {
        episodes: Some(2),
        tls: Some(every_key_of_tls()),
        action_field: Some(String::new()),
        observation: Some(String::new()),
        ..RemoteConfig::default()
    }
}

/// What TRL's `GRPOConfig` calls some keys.
const RENAMED: [(&str, &str); 13] = [
    ("delta", "trainer.dual_clip"),
    ("epsilon", "trainer.clip_low"),
    ("epsilon_high", "trainer.clip_high"),
    ("loss_type", "trainer.loss"),
    ("lr_scheduler_type", "trainer.lr_schedule"),
    ("mask_truncated_completions", "trainer.mask_truncated"),
    ("max_completion_length", "rollout.max_new_tokens"),
    ("max_steps", "trainer.steps"),
    ("max_tool_calling_iterations", "rollout.max_turns"),
    ("multi_objective_aggregation", "trainer.reward_aggregation"),
    ("num_generations", "rollout.group_size"),
    ("off_policy_mask_threshold", "trainer.off_policy_threshold"),
    ("use_bias_correction_kl", "trainer.kl_bias_correction"),
];

/// Says which known key was probably meant: the nearest of the section, TRL's name for one, or one
/// of the same name elsewhere.
fn hint(name: &str, section_path: &[String], section: &Table, known: &Table) -> String {
    let full = |section: &[String], name: &str| {
        let mut path = section.to_vec();
        path.push(name.to_owned());
        path.join(".")
    };
    let near = section
        .keys()
        .map(|candidate| (edit_distance(name, candidate), candidate))
        .min()
        .filter(|(distance, _)| *distance <= (name.chars().count() / 3).max(2));
    if let Some((_, candidate)) = near {
        return format!("did you mean `{}`?", full(section_path, candidate));
    }
    if let Some((_, ours)) = RENAMED.iter().find(|(theirs, _)| *theirs == name) {
        return format!("did you mean `{ours}`?");
    }
    let elsewhere = known.iter().find(|(_, value)| {
        value
            .as_table()
            .is_some_and(|section| section.contains_key(name))
    });
    if let Some((section, _)) = elsewhere {
        return format!("did you mean `{section}.{name}`?");
    }
    let keys: Vec<&str> = section.keys().map(String::as_str).collect();
    format!("known keys: {}", keys.join(", "))
}

/// Returns the Levenshtein distance of two short words.
fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let substituted = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_value_in_the_table_of_known_keys() {
        let json = serde_json::to_value(every_key()).unwrap();
        // `skip_serializing_if` would drop an unset option, so count the fields themselves.
        let debug = format!("{:?}", every_key());
        assert!(
            !debug.contains("None,") && !debug.contains("None }"),
            "{debug}"
        );
        assert_eq!(json.as_object().unwrap().len(), 14);
    }

    #[test]
    fn a_preset_lies_under_the_file_and_reads_back() {
        for preset in Preset::ALL {
            let name = Value::try_from(preset).unwrap();
            let text = format!("preset = {name}\nmodel.path = 'm'\ntask.path = 't'\n");
            let config = RunConfig::from_toml(&text, &["trainer.learning_rate=1e-3"]).unwrap();
            assert_eq!(config.preset, Some(preset));
            // What is set goes before the preset, and the preset before the defaults.
            assert_eq!(
                (config.model.path.as_str(), config.trainer.learning_rate),
                ("m", 1e-3)
            );
            assert_ne!(config.trainer, RunConfig::default().trainer);
            let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
            assert_eq!(again, config);
        }
        let seed = RunConfig::from_toml("", &["preset=seed-mbpp"]).unwrap();
        assert_eq!(seed.rollout.group_size * seed.rollout.groups_per_step, 8);
        assert!(seed.task.split.is_some());
        // Splits are those of the preset's tasks.
        let own = RunConfig::from_toml("", &["preset=seed-mbpp", "task.path=own.jsonl"]).unwrap();
        assert_eq!((own.task.split, own.task.eval_split), (None, None));
        let again = RunConfig::from_toml::<&str>(&own.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(again, own);
        let error = RunConfig::from_toml("", &["preset=grpo"]).unwrap_err();
        assert!(error.to_string().contains("seed-mbpp"), "{error}");
    }

    #[test]
    fn a_preset_that_is_set_lies_over_the_file() {
        let file = "preset = 'dapo'\nmodel.path = 'm'\ntask.path = 't'\n\
                    trainer.learning_rate = 3e-4\nrollout.group_size = 4";
        let config = RunConfig::from_toml::<&str>(file, &[]).unwrap();
        assert_eq!(
            (config.trainer.learning_rate, config.rollout.group_size),
            (3e-4, 4)
        );
        let sets = ["rollout.group_size=6", "preset=dr-grpo"];
        assert_eq!(Preset::named_in(&sets), Some(Preset::DrGrpo));
        let config = RunConfig::from_toml(file, &sets).unwrap();
        assert_eq!(
            (config.trainer.learning_rate, config.rollout.group_size),
            (1e-6, 6)
        );
        assert_eq!(config.preset, Some(Preset::DrGrpo));
        // It stands in place of the file's own.
        assert_eq!(config.trainer.overlong_limit, None);
        let again = RunConfig::from_toml::<&str>(&config.to_toml().unwrap(), &[]).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn other_names_lead_to_known_keys() {
        let known = Table::try_from(every_key()).unwrap();
        for (theirs, ours) in RENAMED {
            let (section, name) = ours.split_once('.').unwrap();
            let inner = known[section].as_table().unwrap();
            assert!(inner.contains_key(name), "{ours}");
            assert_eq!(
                hint(theirs, &[section.to_owned()], &Table::new(), &known),
                format!("did you mean `{ours}`?")
            );
        }
    }

    #[test]
    fn distances_count_edits() {
        for (left, right, expected) in [
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("kitten", "sitting", 3),
            ("clip_hi", "clip_high", 2),
        ] {
            assert_eq!(edit_distance(left, right), expected);
            assert_eq!(edit_distance(right, left), expected);
        }
    }

    #[test]
    fn a_set_value_is_toml_or_a_bare_string() {
        let text = |value: &str| Value::String(value.to_owned());
        assert_eq!(parse_value("3"), Value::Integer(3));
        assert_eq!(parse_value("1e-5"), Value::Float(1e-5));
        assert_eq!(parse_value("true"), Value::Boolean(true));
        assert_eq!(parse_value("'3'"), text("3"));
        assert_eq!(
            parse_value("[1, 2]"),
            Value::Array(vec![Value::Integer(1), Value::Integer(2)])
        );
        for bare in [
            "256MiB",
            "2s",
            "Qwen/Qwen3-0.6B",
            "a = b",
            "1\nseed = 2",
            "",
            "/tmp/x y",
        ] {
            assert_eq!(parse_value(bare), text(bare));
        }
    }
}
