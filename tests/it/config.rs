//! The run file: layers, messages and round trips.

use std::time::Duration;

use bytesize::ByteSize;
use rstest::rstest;
use wardian::config::{ConfigError, Dtype, LossType, RunConfig, TrainMode};
use wardian::task::Split;

/// The least that a run file has to say.
const LEAST: &str = "model.path = 'model'\ntask.path = 'tasks.jsonl'\n";

fn with(set: &str) -> Result<RunConfig, ConfigError> {
    RunConfig::from_toml(LEAST, &[set])
}

fn message(error: &ConfigError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[test]
fn layers_lie_over_each_other_key_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    let text = "
        seed = 7
        [model]
        path = 'from-file'
        dtype = 'bf16'
        [task]
        path = 'tasks.jsonl'
        split = 'validation'
        [rollout]
        group_size = 16
        temperature = 1
        [sandbox]
        memory = '512 MiB'
        deadline = '1m 30s'
    ";
    fs_err::write(&path, text).unwrap();
    let sets = [
        "model.path=Qwen/Qwen3-0.6B",
        "rollout.group_size = 4",
        "trainer.learning_rate=1e-6",
        "trainer.loss=dr_grpo",
        "sandbox.output=1024",
        "sandbox.deadline=500ms",
        "eval.k=[1]",
        "trainer.mode=full",
    ];
    let config = RunConfig::load(Some(&path), &sets).unwrap();
    assert_eq!((config.seed, config.model.dtype), (7, Dtype::Bf16));
    assert_eq!(config.model.path, "Qwen/Qwen3-0.6B");
    assert_eq!(
        (config.rollout.group_size, config.rollout.groups_per_step),
        (4, 8)
    );
    assert_eq!(config.rollout.temperature, 1.0);
    assert_eq!(config.task.split, Some(Split::Validation));
    assert_eq!(config.trainer.learning_rate, 1e-6);
    assert_eq!(
        (config.trainer.loss, config.trainer.mode),
        (LossType::DrGrpo, TrainMode::Full)
    );
    assert_eq!(
        (config.sandbox.memory, config.sandbox.output),
        (ByteSize::mib(512), ByteSize::kib(1))
    );
    assert_eq!(config.sandbox.deadline, Duration::from_millis(500));
    // The last of two sets holds.
    let twice = RunConfig::from_toml(LEAST, &["seed=1", "seed=2"]).unwrap();
    assert_eq!(twice.seed, 2);
}

#[test]
fn the_resolved_file_reads_back_as_the_same_run() {
    let sets = [
        "sandbox.output=1000",
        "sandbox.memory=1.5GiB",
        "sandbox.deadline=1500ms",
        "task.eval_path=other",
        "rollout.system_prompt=Say \"hi\".",
        "trainer.learning_rate=3e-7",
        "eval.samples=8",
        "eval.temperature=0.6",
        "eval.k=[1, 8]",
    ];
    let config = RunConfig::from_toml(LEAST, &sets).unwrap();
    let text = config.to_toml().unwrap();
    assert_eq!(
        RunConfig::from_toml(&text, &[""; 0]).unwrap(),
        config,
        "{text}"
    );
    assert!(
        text.contains("memory = \"1536MiB\"") && text.contains("output = \"1000B\""),
        "{text}"
    );
}

#[rstest]
#[case::near(
    "rollout.groupsize=4",
    "unknown key `rollout.groupsize` in `--set rollout.groupsize=4`; did you mean `rollout.group_size`?"
)]
#[case::other_section("trainer.group_size=4", "did you mean `rollout.group_size`?")]
#[case::section(
    "train.steps=4",
    "unknown key `train` in `--set train.steps=4`; did you mean `trainer`?"
)]
#[case::far(
    "trainer.quantum=4",
    "unknown key `trainer.quantum` in `--set trainer.quantum=4`; known keys: adam_beta1, adam_beta2"
)]
#[case::optional("model.adaptor=x", "did you mean `model.adapter`?")]
#[case::is_section(
    "eval=3",
    "`eval` in `--set eval=3` is a section, not a value; set one of its keys: every, k, limit, samples, temperature"
)]
#[case::below_a_value(
    "seed.x=3",
    "`seed` can not be `{ x = 3 }` in `--set seed.x=3`: invalid type: map, expected u64"
)]
#[case::word_for_number(
    "rollout.group_size=eight",
    "`rollout.group_size` can not be `\"eight\"` in `--set rollout.group_size=eight`: invalid type: string \"eight\", expected usize"
)]
#[case::negative("rollout.group_size=-1", "`rollout.group_size` can not be `-1`")]
#[case::unknown_name(
    "trainer.loss=ppo",
    "`trainer.loss` can not be `\"ppo\"` in `--set trainer.loss=ppo`: unknown variant `ppo`, expected one of `grpo`, `dapo`, `bnpo`, `dr_grpo`, `gspo`"
)]
#[case::no_unit(
    "sandbox.deadline=2",
    "`sandbox.deadline` can not be `2` in `--set sandbox.deadline=2`: expected a duration such as `\"2s\"` or `\"500ms\"`"
)]
#[case::bad_unit(
    "sandbox.deadline=2x",
    "expected a duration such as `2s`, `500ms` or `1m 30s`"
)]
#[case::bad_size(
    "sandbox.memory=much",
    "expected a size such as `256MiB` or a number of bytes"
)]
#[case::no_value("seed", "`--set seed` is not `section.key=value`")]
#[case::no_key(".x=1", "`--set .x=1` is not `section.key=value`")]
fn a_wrong_set_is_named(#[case] set: &str, #[case] expected: &str) {
    let error = message(&with(set).unwrap_err());
    assert!(error.contains(expected), "{error}");
}

#[rstest]
#[case(
    "model.path=",
    "`model.path` is ``; give a checkpoint folder, a GGUF file or a hub repository such as `Qwen/Qwen3-0.6B`; without `--config`, it is the carried starter model"
)]
#[case("seed=-1", "`seed` can not be `-1`")]
#[case(
    "rollout.group_size=1",
    "`rollout.group_size` is `1`; make it from 2 to 1000000: a sample is judged against its group"
)]
#[case(
    "rollout.temperature=0",
    "`rollout.temperature` is `0`; make it from 0.001 to 10"
)]
#[case(
    "rollout.temperature=nan",
    "`rollout.temperature` is `NaN`; make it from 0.001 to 10"
)]
#[case(
    "rollout.max_total_tokens=512",
    "make it more than `rollout.max_new_tokens` (512)"
)]
#[case(
    "rollout.tool_output=1",
    "`rollout.tool_output` is `1`; make it at least 256B"
)]
#[case(
    "sandbox.memory=32MiB",
    "`sandbox.memory` is `32.0 MiB`; make it from 64MiB"
)]
#[case(
    "sandbox.memory=5GiB",
    "`sandbox.memory` is `5.0 GiB`; make it from 64MiB"
)]
#[case(
    "sandbox.fuel=1000",
    "`sandbox.fuel` is `1000`; make it at least 1000000000"
)]
#[case(
    "sandbox.deadline=1h",
    "`sandbox.deadline` is `3600s`; make it from 10ms to 10m"
)]
#[case(
    "sandbox.output=1GiB",
    "`sandbox.output` is `1.0 GiB`; make it from 256B to 64MiB"
)]
#[case("trainer.steps=0", "`trainer.steps` is `0`; make it at least 1")]
#[case(
    "trainer.learning_rate=5",
    "`trainer.learning_rate` is `5`; make it above 0 and at most 0.1"
)]
#[case(
    "trainer.adam_beta2=1",
    "`trainer.adam_beta2` is `1`; make it from 0 to below 1"
)]
#[case("trainer.beta=-0.1", "`trainer.beta` is `-0.1`; make it at least 0")]
#[case(
    "trainer.clip_low=1",
    "`trainer.clip_low` is `1`; make it above 0 and below 1"
)]
#[case(
    "trainer.clip_high=inf",
    "`trainer.clip_high` is `inf`; make it above 0"
)]
#[case(
    "trainer.micro_batch_tokens=100",
    "make it at least `rollout.max_total_tokens` (4096)"
)]
#[case(
    "trainer.lora_rank=0",
    "`trainer.lora_rank` is `0`; make it from 1 to 1024, or set `trainer.mode = \"full\"`"
)]
#[case(
    "trainer.lora_targets=[]",
    "`trainer.lora_targets` is `[]`; name a projection"
)]
#[case(
    "trainer.lora_dropout=1",
    "`trainer.lora_dropout` is `1`; make it from 0 to below 1"
)]
#[case(
    "trainer.modules_to_save=['lm_head', 'norm']",
    "`trainer.modules_to_save` is `norm`; name `lm_head`, `embed_tokens` or both"
)]
#[case(
    "trainer.ensure_weight_tying=true",
    "`trainer.ensure_weight_tying` is `true`; name `lm_head` or `embed_tokens`"
)]
#[case(
    "eval.samples=4",
    "`eval.samples` is `4`; at `eval.temperature = 0` all samples are alike"
)]
#[case(
    "eval.k=[1, 8]",
    "`eval.k` is `[1, 8]`; name each from 1 to `eval.samples` (1)"
)]
#[case("task.limit=0", "`task.limit` is `0`; leave it out for all tasks")]
#[case(
    "trainer.overlong_limit=5000",
    "`trainer.overlong_limit` is `5000`; make it at most `rollout.max_total_tokens` (4096)"
)]
#[case(
    "trainer.gae_lambda=1.5",
    "`trainer.gae_lambda` is `1.5`; make it from 0 to 1"
)]
#[case(
    "trainer.max_processes=9",
    "`trainer.max_processes` is `9`; make it from 1 to `rollout.groups_per_step` (8)"
)]
#[case(
    "trainer.async_level=2",
    "`trainer.async_level` is `2`; make it 0, or 1 for episodes that are one step old"
)]
#[case(
    "rollout.max_step_tokens=0",
    "`rollout.max_step_tokens` is `0`; make it at least 1, or leave it out"
)]
#[case(
    "rollout.max_off_policy_steps=0",
    "`rollout.max_off_policy_steps` is `0`; make it from 1 to 1000"
)]
#[case(
    "rollout.deadline=0s",
    "`rollout.deadline` is `0s`; make it longer than any episode, or leave it out"
)]
#[case(
    "watch.collapse=skip",
    "`watch.collapse` is `skip`; make it `warn` or `stop`"
)]
#[case(
    "watch.max_truncated=2",
    "`watch.max_truncated` is `2`; make it from 0 to 1"
)]
fn a_senseless_value_is_named_with_its_remedy(#[case] set: &str, #[case] expected: &str) {
    let error = message(&with(set).unwrap_err());
    assert!(error.contains(expected), "{error}");
}

#[test]
fn lora_targets_are_a_name_or_a_list() {
    let targets = |value: &str| {
        let config = with(&format!("trainer.lora_targets={value}")).unwrap();
        // What is written reads back as the same run.
        let text = config.to_toml().unwrap();
        assert_eq!(RunConfig::from_toml(&text, &[""; 0]).unwrap(), config);
        config.trainer.lora_targets
    };
    assert_eq!(targets("all-linear"), ["all-linear"]);
    assert_eq!(targets("['all-linear']"), ["all-linear"]);
    assert_eq!(targets("['q_proj', 'v_proj']"), ["q_proj", "v_proj"]);
    let error = message(&with("trainer.lora_targets=3").unwrap_err());
    assert!(
        error.contains("expected a name or a list of names"),
        "{error}"
    );
}

#[test]
fn tokens_that_are_credited_one_by_one_need_no_group() {
    let alone = "rollout.group_size=1";
    with(alone).unwrap_err();
    for advantage in ["gae", "reinforce_plus_plus"] {
        let advantage = format!("trainer.advantage={advantage}");
        RunConfig::from_toml(LEAST, &[&advantage, alone]).unwrap();
        let gdpo = "trainer.reward_aggregation=gdpo";
        let error = RunConfig::from_toml(LEAST, &[&advantage, gdpo]).unwrap_err();
        assert!(message(&error).contains("make it `sum`"), "{error}");
    }
}

#[test]
fn episodes_that_wait_are_kept_by_one_process_and_need_no_further_draws() {
    let bound = "rollout.max_step_tokens=100";
    let with = |other: &str| RunConfig::from_toml(LEAST, &[bound, other]);
    with("trainer.async_level=1").unwrap();
    for other in [
        "trainer.dynamic_sampling=true",
        "trainer.max_processes=2",
        "rollout.max_thinking_tokens=50",
    ] {
        let error = message(&with(other).unwrap_err());
        let key = other.split('=').next().expect("a key");
        let expected = format!("`rollout.max_step_tokens` is `100`; leave it out: with `{key}`");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn an_agent_is_given_no_limits_that_are_not_its_own() {
    let agent = "rollout.agent.command=['python3', 'agent.py']";
    with(agent).unwrap();
    for other in [
        "rollout.deadline=10s",
        "rollout.max_thinking_tokens=50",
        "rollout.max_step_tokens=50",
        "trainer.async_level=1",
    ] {
        let error = message(&RunConfig::from_toml(LEAST, &[agent, other]).unwrap_err());
        let key = other.split('=').next().expect("a key");
        assert!(error.contains(&format!("`{key}` is ")), "{error}");
        assert!(error.contains("a program (`rollout.agent`)"), "{error}");
    }
}

#[test]
fn dropout_is_refused_where_it_would_be_taken_for_something_else() {
    let dropout = "trainer.lora_dropout=0.1";
    with(dropout).unwrap();
    for other in [
        "model.compute_dtype=bf16",
        "trainer.sampler_correction=token_truncate",
        "trainer.off_policy_threshold=0.2",
        "trainer.async_level=1",
        "rollout.max_step_tokens=100",
    ] {
        let error = message(&RunConfig::from_toml(LEAST, &[dropout, other]).unwrap_err());
        let key = other.split('=').next().expect("a key");
        let expected = format!("`trainer.lora_dropout` is `0.1`; make it 0, or leave out `{key}`");
        assert!(error.contains(&expected), "{error}");
        // All weights are trained without.
        if key != "model.compute_dtype" {
            RunConfig::from_toml(LEAST, &["trainer.mode=full", dropout, other]).unwrap();
        }
    }
}

#[test]
fn all_senseless_values_are_reported_at_once() {
    let error = RunConfig::from_toml("", &["trainer.mode=full", "model.adapter=a"]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "this cannot be done as configured: \
         \n  `model.path` is ``; give a checkpoint folder, a GGUF file or a hub repository such as `Qwen/Qwen3-0.6B`; without `--config`, it is the carried starter model\
         \n  `model.adapter` is `a`; an adapter can be trained on only with `trainer.mode = \"lora\"`"
    );
}

#[test]
fn a_file_that_is_not_toml_is_shown_at_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    fs_err::write(&path, "[model]\npath = Qwen\n").unwrap();
    let error = message(&RunConfig::load(Some(&path), &[""; 0]).unwrap_err());
    assert!(
        error.contains("run.toml` is not valid TOML: TOML parse error at line 2"),
        "{error}"
    );
    let gone = RunConfig::load(Some(&folder.path().join("gone.toml")), &[""; 0]).unwrap_err();
    assert!(message(&gone).contains("gone.toml"), "{gone}");
    fs_err::write(&path, "[rollout]\ngroup_sizes = 3\n").unwrap();
    let error = message(&RunConfig::load(Some(&path), &[""; 0]).unwrap_err());
    assert!(
        error.ends_with("run.toml`; did you mean `rollout.group_size`?"),
        "{error}"
    );
}

/// Two environments.
const TWO: &str = "model.path = 'm'\n[environments]\n\
                   code = {path = 'a.jsonl', weight = 3, reward = {test_fraction = 0.5}}\n\
                   maths = {path = 'b', split = 'train', tools = false, deadline = '2s', limit = 5}\n\
                   [task]\nvisible_tests = 2\nlimit = 9\n[reward]\npassed = 2.0\n";

#[test]
fn an_environment_has_the_runs_settings_but_for_its_own() {
    let sets = [
        "environments.code.weight=1.5",
        "environments.code.max_turns=2",
    ];
    let config = RunConfig::from_toml(TWO, &sets).unwrap();
    assert_eq!(config.environments["code"].weight, 1.5);
    let alone = |name: &str| config.environments[name].alone(&config);
    let (code, maths) = (alone("code"), alone("maths"));
    assert_eq!(
        (code.task.path.as_str(), maths.task.path.as_str()),
        ("a.jsonl", "b")
    );
    assert_eq!((code.task.limit, maths.task.limit), (Some(9), Some(5)));
    assert_eq!(
        (code.task.visible_tests, maths.task.split),
        (2, Some(Split::Train))
    );
    assert_eq!((code.rollout.max_turns, maths.rollout.max_turns), (2, 6));
    // A reward of its own stands in place of the whole section.
    assert_eq!((code.reward.passed, code.reward.test_fraction), (1.0, 0.5));
    assert_eq!(
        (maths.reward.passed, maths.reward.test_fraction),
        (2.0, 0.0)
    );
    assert_eq!(maths.sandbox.deadline, Duration::from_secs(2));
    assert_eq!(code.sandbox.deadline, Duration::from_secs(30));
    assert!(code.environments.is_empty());
    code.validate().unwrap();
    let file = config.to_toml().unwrap();
    assert_eq!(
        RunConfig::from_toml(&file, &[""; 0]).unwrap(),
        config,
        "{file}"
    );
    // A run without any has no trace of them in its file.
    let single = RunConfig::from_toml(LEAST, &[""; 0]).unwrap();
    assert!(!single.to_toml().unwrap().contains("environments"));
    // A preset's own tasks give way.
    let seeded = format!("preset = 'seed-mbpp'\n{TWO}");
    let seeded = RunConfig::from_toml::<&str>(&seeded, &[]).unwrap();
    assert_eq!((seeded.task.path.as_str(), seeded.task.split), ("", None));
}

#[rstest]
#[case::unknown(
    "environments.code.wieght=1",
    "unknown key `environments.code.wieght` in `--set environments.code.wieght=1`; did you mean `environments.code.weight`?"
)]
#[case::unknown_reward(
    "environments.code.reward.pased=1",
    "did you mean `environments.code.reward.passed`?"
)]
#[case::not_a_section(
    "environments.code=3",
    "`environments.code` in `--set environments.code=3` is a section"
)]
#[case::wrong_type(
    "environments.code.weight=much",
    "`environments.code.weight` can not be `\"much\"`"
)]
#[case::zero(
    "environments.code.weight=0",
    "`environments.code.weight` is `0`; make it above 0, or leave the environment out"
)]
#[case::negative(
    "environments.code.weight=-1.0",
    "`environments.code.weight` is `-1`; make it above 0"
)]
#[case::nan(
    "environments.maths.weight=nan",
    "`environments.maths.weight` is `NaN`; make it above 0"
)]
#[case::infinite(
    "environments.maths.weight=inf",
    "`environments.maths.weight` is `inf`; make it above 0"
)]
#[case::no_path(
    "environments.third.weight=1",
    "`environments.third.path` is ``; give a task file, a folder or a hub data set"
)]
#[case::name(
    "environments.a/b.path=x",
    "`environments` is `a/b`; name an environment with 1 to 64 letters"
)]
#[case::task_too(
    "task.path=c.jsonl",
    "`task.path` is `c.jsonl`; leave it out, or make it an environment of its own"
)]
#[case::split_too("task.split=test", "`task.split` is `test`; leave it out")]
#[case::turns(
    "environments.code.max_turns=0",
    "`environments.code.max_turns` is `0`; make it from 1"
)]
#[case::tokens(
    "environments.code.max_new_tokens=4096",
    "`environments.code.max_new_tokens` is `4096`; make it from 1 to below `rollout.max_total_tokens` (4096)"
)]
#[case::fuel(
    "environments.code.fuel=5",
    "`environments.code.fuel` is `5`; make it at least 1000000000"
)]
#[case::reward(
    "environments.code.reward.fuel_penalty=2",
    "`environments.code.reward.fuel_penalty` is `2`; make it from 0 to 1: it is the share of `environments.code.reward.passed`"
)]
#[case::gdpo(
    "trainer.reward_aggregation=gdpo",
    "`environments.code.reward` is `a table`; leave it out"
)]
fn a_senseless_environment_is_named_with_its_remedy(#[case] set: &str, #[case] expected: &str) {
    let error = message(&RunConfig::from_toml(TWO, &[set]).unwrap_err());
    assert!(error.contains(expected), "{error}");
}

#[test]
fn two_environments_of_one_name_are_refused_by_name() {
    let twice = format!("{TWO}[environments.code]\npath = 'c'\n");
    let error = message(&RunConfig::from_toml::<&str>(&twice, &[]).unwrap_err());
    assert!(error.contains("is not valid TOML"), "{error}");
    let twice = "[environments.code]\npath = 'c'\n[environments.code]\npath = 'd'\n";
    let error = message(&RunConfig::from_toml::<&str>(twice, &[]).unwrap_err());
    assert!(
        error.contains("code") && error.contains("duplicate"),
        "{error}"
    );
}

#[test]
fn reward_terms_are_read_and_checked() {
    let config = with("reward.named.style=0.5").unwrap();
    assert_eq!(config.reward.weight("style"), 0.5);
    assert_eq!(config.reward.weight("passed"), 1.0);
    let file = config.to_toml().unwrap();
    assert_eq!(RunConfig::from_toml(&file, &[""; 0]).unwrap(), config);
    for (set, expected) in [
        ("reward.pased=1", "did you mean `reward.passed`?"),
        ("reward.named.style='much'", "reward.named.style"),
        ("reward.named=1", "reward.named"),
        (
            "reward.fuel_penalty=2",
            "`reward.fuel_penalty` is `2`; make it from 0 to 1",
        ),
        (
            "reward.named.style=inf",
            "`reward.named.style` is `inf`; make it a finite number",
        ),
        ("reward.length_margin=9000", "at most `reward.length_limit`"),
    ] {
        let error = message(&with(set).unwrap_err());
        assert!(error.contains(expected), "{set}: {error}");
    }
}
