//! Which metrics belong together, for whoever draws them.

use serde::Serialize;

/// What belongs into one chart.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Group {
    /// Where it stands on a page of several sections.
    pub(crate) section: Section,
    /// What the chart shows.
    pub(crate) title: &'static str,
    /// The metrics. A name that ends in `*` stands for all that start so.
    pub(crate) names: &'static [&'static str],
    /// Which of them the others are parts of, where they add up to it, or to less.
    pub(crate) whole: Option<&'static str>,
}

/// What charts are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Section {
    /// What is learned.
    Learning,
    /// What episodes are like.
    Episodes,
    /// Where time goes.
    Speed,
    /// Where programs run.
    Sandbox,
    /// Actors of the heavy tier.
    Actors,
    /// Memory.
    Memory,
}

const fn group(section: Section, title: &'static str, names: &'static [&'static str]) -> Group {
    Group {
        section,
        title,
        names,
        whole: None,
    }
}

const fn parts(
    section: Section,
    title: &'static str,
    whole: &'static str,
    names: &'static [&'static str],
) -> Group {
    Group {
        whole: Some(whole),
        ..group(section, title, names)
    }
}

/// The charts in the page's order. What none names has one of its own at the end, so nothing that was
/// logged is hidden.
pub(crate) const CHARTS: &[Group] = &[
    group(Section::Learning, "Reward", &["reward", "reward_std"]),
    group(Section::Learning, "Reward by environment", &["reward/*"]),
    group(
        Section::Learning,
        "Pass rate of a step's groups",
        &["pass_rate"],
    ),
    group(
        Section::Learning,
        "Pass rate by environment",
        &["pass_rate/*"],
    ),
    group(
        Section::Learning,
        "Parts of the reward, mean",
        &["rewards/*"],
    ),
    group(
        Section::Learning,
        "Held-out pass@1",
        &["eval/pass_at_1", "eval/pass_at_1/*"],
    ),
    group(
        Section::Learning,
        "Groups whose rewards are alike, share",
        &["frac_reward_zero_std"],
    ),
    group(Section::Learning, "Loss", &["loss"]),
    group(Section::Learning, "Gradient norm", &["grad_norm"]),
    group(Section::Learning, "Entropy, nats a token", &["entropy"]),
    group(Section::Learning, "Divergence from the reference", &["kl"]),
    group(
        Section::Learning,
        "Sampler and trainer, divergence",
        &["kl_sample_train"],
    ),
    group(
        Section::Learning,
        "Tokens whose ratio was clipped, share",
        &["clip_ratio/*"],
    ),
    group(Section::Learning, "Learning rate", &["learning_rate"]),
    group(
        Section::Episodes,
        "Sampled tokens an episode",
        &[
            "completions/mean_length",
            "completions/min_length",
            "completions/max_length",
        ],
    ),
    group(
        Section::Episodes,
        "Episodes cut off, share",
        &["completions/clipped_ratio"],
    ),
    group(Section::Episodes, "Turns an episode", &["episodes/turns"]),
    group(
        Section::Episodes,
        "Tool calls: an episode, and their failures",
        &["tools/call_frequency", "tools/failure_frequency"],
    ),
    group(Section::Episodes, "How episodes ended", &["endings/*"]),
    group(
        Section::Episodes,
        "Episodes we failed to score",
        &["episodes/unscorable"],
    ),
    parts(
        Section::Speed,
        "Seconds a step",
        "step_time",
        &["step_time", "generate_time", "update_time"],
    ),
    group(
        Section::Speed,
        "Tokens sampled a second",
        &["tokens_per_second"],
    ),
    group(
        Section::Sandbox,
        "Seconds of guests, summed over a step's episodes",
        &["sandbox/tool_seconds", "sandbox/grade_seconds"],
    ),
    group(Section::Sandbox, "Fuel a step", &["sandbox/fuel"]),
    group(
        Section::Sandbox,
        "Programs and commands a step",
        &["sandbox/runs"],
    ),
    group(
        Section::Sandbox,
        "How programs and commands ended",
        &["sandbox/endings/*"],
    ),
    group(
        Section::Actors,
        "Actors: started, lost, commands that took too long",
        &["actor/started", "actor/lost", "actor/commands_timed_out"],
    ),
    group(
        Section::Actors,
        "Seconds until actors were there",
        &["actor/start_seconds"],
    ),
    group(
        Section::Memory,
        "Most bytes of a pass",
        &["memory/peak_bytes"],
    ),
    group(
        Section::Memory,
        "Tokens of a pass",
        &["memory/micro_batch_tokens"],
    ),
];

/// The interval of a metric, where another key of its row has it.
pub(crate) const INTERVALS: &[(&str, &str)] = &[("eval/pass_at_1", "eval/ci95")];
