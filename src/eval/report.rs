//! Scores of many tasks as one report.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng as _;
use serde::{Deserialize, Serialize};

use crate::trajectory::Trajectory;

use super::pass_at_k;

/// How often each interval resamples the tasks. At 10,000 the ends of a 95 % interval of 200 tasks
/// move by less than 0.002 between seeds.
const RESAMPLES: usize = 10_000;

/// Changes whose signs are all tried; more are drawn.
const EXACT_SIGNS: usize = 16;

/// The samples of one task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskScore {
    /// The task's id.
    pub task_id: String,
    /// How many samples were scored.
    pub n: u32,
    /// How many of those passed.
    pub c: u32,
    /// How many samples could not be scored, for a fault that is not the policy's.
    #[serde(default)]
    pub unscorable: u32,
}

impl TaskScore {
    /// Counts the episodes of each task, in the order in which the tasks first appear.
    pub fn count<'a>(episodes: impl IntoIterator<Item = &'a Trajectory>) -> Vec<Self> {
        let mut scores: IndexMap<&str, Self> = IndexMap::new();
        for episode in episodes {
            let score = scores.entry(&episode.task_id).or_insert_with(|| Self {
                task_id: episode.task_id.clone(),
                n: 0,
                c: 0,
                unscorable: 0,
            });
            match episode.passed {
                Some(passed) => {
                    score.n += 1;
                    score.c += u32::from(passed);
                }
                None => score.unscorable += 1,
            }
        }
        scores.into_values().collect()
    }

    /// Adds further samples of the same task.
    pub fn add(&mut self, other: &Self) {
        self.n += other.n;
        self.c += other.c;
        self.unscorable += other.unscorable;
    }

    fn pass_at(&self, k: u32) -> Option<f64> {
        pass_at_k(self.n, self.c, k)
    }
}

/// How well a policy does on a set of tasks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalReport {
    /// The mean over tasks of the share of samples that passed; 0 when no task was scored.
    pub pass_at_1: f64,
    /// The 95 % percentile-bootstrap interval of `pass_at_1`, over tasks; Wilson's where all of them are alike.
    pub ci95: [f64; 2],
    /// How many tasks had a scored sample, which is how many the means are over.
    pub tasks: usize,
    /// How many samples were scored.
    pub samples: u64,
    /// How many samples could not be scored; they count in nothing else.
    pub unscorable: u64,
    /// The mean of pass@k over the tasks with at least `k` scored samples, by `k`.
    pub pass_at: BTreeMap<u32, f64>,
    /// The interval of each `pass_at`, as `ci95` is that of `pass_at_1`, by `k`.
    #[serde(default)]
    pub pass_at_ci95: BTreeMap<u32, [f64; 2]>,
    /// How many tasks each `pass_at` is over, by `k`.
    #[serde(default)]
    pub pass_at_tasks: BTreeMap<u32, usize>,
    /// The counts behind it.
    pub scores: Vec<TaskScore>,
}

impl EvalReport {
    /// Summarizes scores, with pass@k for each of `ks` that some task has samples enough for. The
    /// same `seed` gives the same interval.
    #[must_use]
    pub fn new(scores: Vec<TaskScore>, ks: &[u32], seed: u64) -> Self {
        let at =
            |k: u32| -> Vec<f64> { (scores.iter().filter_map(|score| score.pass_at(k))).collect() };
        let rates = at(1);
        let ci95 = share_ci95(&rates, seed);
        let mut report = Self {
            pass_at_1: mean(&rates),
            ci95,
            tasks: rates.len(),
            ..Self::default()
        };
        for k in ks.iter().copied() {
            let values = at(k);
            if values.is_empty() {
                continue;
            }
            report.pass_at.insert(k, mean(&values));
            let interval = match k {
                1 => ci95,
                _ => share_ci95(&values, seed),
            };
            report.pass_at_ci95.insert(k, interval);
            report.pass_at_tasks.insert(k, values.len());
        }
        Self {
            samples: scores.iter().map(|score| u64::from(score.n)).sum(),
            unscorable: scores.iter().map(|score| u64::from(score.unscorable)).sum(),
            scores,
            ..report
        }
    }

    /// Returns by how much this report's pass@1 is above another's on the tasks that both scored.
    ///
    /// The tasks are paired, so that their difficulty, which is most of what makes `ci95` wide, is
    /// not counted as doubt about the difference. None when no task is in both.
    #[must_use]
    pub fn difference(&self, before: &Self, seed: u64) -> Option<Difference> {
        let rates: BTreeMap<&str, f64> = before.rates().collect();
        let changes: Vec<f64> = self
            .rates()
            .filter_map(|(id, rate)| Some(rate - rates.get(id)?))
            .collect();
        (!changes.is_empty()).then(|| Difference {
            pass_at_1: mean(&changes),
            ci95: bootstrap_ci95(&changes, seed),
            p_value: sign_flip_p_value(&changes, seed),
            tasks: changes.len(),
        })
    }

    fn rates(&self) -> impl Iterator<Item = (&str, f64)> {
        self.scores
            .iter()
            .filter_map(|score| Some((score.task_id.as_str(), score.pass_at(1)?)))
    }
}

/// A change of pass@1 between two reports.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// The mean change over the shared tasks.
    pub pass_at_1: f64,
    /// Its 95 % percentile-bootstrap interval, over paired tasks.
    pub ci95: [f64; 2],
    /// The two-sided p-value of the paired permutation test: how likely a change at least as large is
    /// where it is chance which report a task's two rates belong to.
    pub p_value: f64,
    /// How many tasks both reports have.
    pub tasks: usize,
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn mean(values: &[f64]) -> f64 {
    if values.is_empty() {
        0.0
    } else {
        values.iter().sum::<f64>() / values.len() as f64
    }
}

/// Returns the 95 % interval of the mean of shares: the bootstrap's, or, where all values are alike and resampling
/// shows nothing, Wilson's score interval of so many draws (Wilson 1927), which is the widest that shares of that mean
/// can have.
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn share_ci95(values: &[f64], seed: u64) -> [f64; 2] {
    /// The 97.5th percentile of the normal distribution.
    const Z: f64 = 1.959_963_984_540_054;
    match values {
        [share, rest @ ..] if rest.iter().all(|value| value == share) => {
            let (n, z2) = (values.len() as f64, Z * Z);
            let center = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
            let spread = (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
            let half = Z * spread / (1.0 + z2 / n);
            [(center - half).max(0.0), (center + half).min(1.0)]
        }
        _ => bootstrap_ci95(values, seed),
    }
}

/// Returns the 2.5th and 97.5th percentile of the mean of `values` resampled with replacement
/// (Efron and Tibshirani 1993, section 13.3); `[0, 0]` for no values.
fn bootstrap_ci95(values: &[f64], seed: u64) -> [f64; 2] {
    if values.is_empty() {
        return [0.0; 2];
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = vec![0.0; values.len()];
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            draw.fill_with(|| values[rng.random_range(0..values.len())]);
            mean(&draw)
        })
        .collect();
    means.sort_unstable_by(f64::total_cmp);
    [percentile(&means, 25), percentile(&means, 975)]
}

/// Returns the two-sided p-value of the mean of `changes` under random signs (Fisher's paired
/// permutation test; Good 2005, section 3.2): from all signs of up to [`EXACT_SIGNS`] changes that are not
/// 0, else from [`RESAMPLES`] draws of them, the observed one among them.
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
fn sign_flip_p_value(changes: &[f64], seed: u64) -> f64 {
    let changes: Vec<f64> = changes
        .iter()
        .copied()
        .filter(|change| *change != 0.0)
        .collect();
    let observed = changes.iter().sum::<f64>().abs();
    // Sums of the same numbers in another order may differ in their last bits.
    let least = observed * (1.0 - 1e-12);
    let is_as_large = |is_flipped: &mut dyn FnMut(usize) -> bool| {
        let signed = |(index, change): (usize, &f64)| match is_flipped(index) {
            true => -change,
            false => *change,
        };
        let sum: f64 = changes.iter().enumerate().map(signed).sum();
        sum.abs() >= least
    };
    if changes.len() <= EXACT_SIGNS {
        let all = 1_u32 << changes.len();
        let large = (0..all).filter(|signs| is_as_large(&mut |index| signs >> index & 1 == 1));
        return large.count() as f64 / f64::from(all);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let draws = (1..RESAMPLES).filter(|_| is_as_large(&mut |_| rng.random()));
    (draws.count() + 1) as f64 / RESAMPLES as f64
}

/// Returns the value at `thousandths` of the way through sorted `values`, interpolated linearly as
/// numpy does by default.
#[expect(clippy::cast_precision_loss, reason = "a remainder below 1000")]
fn percentile(values: &[f64], thousandths: usize) -> f64 {
    let place = thousandths * (values.len() - 1);
    let (below, part) = (place / 1000, (place % 1000) as f64 / 1000.0);
    let above = (below + 1).min(values.len() - 1);
    values[below] + (values[above] - values[below]) * part
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(id: u32, n: u32, c: u32, unscorable: u32) -> TaskScore {
        TaskScore {
            task_id: id.to_string(),
            n,
            c,
            unscorable,
        }
    }

    #[test]
    fn unscorable_samples_count_in_nothing() {
        let scores = vec![score(1, 4, 2, 0), score(2, 2, 2, 2), score(3, 0, 0, 4)];
        let report = EvalReport::new(scores, &[1, 4, 8], 0);
        assert_eq!((report.tasks, report.samples, report.unscorable), (2, 6, 6));
        assert_eq!(report.pass_at_1, 0.75);
        // pass@4 is over the one task with four samples, and no task has eight.
        assert_eq!(report.pass_at, BTreeMap::from([(1, 0.75), (4, 1.0)]));
        assert_eq!(report.pass_at_tasks, BTreeMap::from([(1, 2), (4, 1)]));
    }

    #[test]
    fn each_k_has_an_interval_of_its_own() {
        // At two samples each, pass@2 of a task is whether one of them passed: 0 or 1, half of each.
        let scores: Vec<_> = (0..200).map(|id| score(id, 2, id % 2, 0)).collect();
        let report = EvalReport::new(scores, &[1, 2], 3);
        assert_eq!(report.pass_at_ci95[&1], report.ci95);
        let half = 1.96 * (0.25_f64 / 200.0).sqrt();
        let [low, high] = report.pass_at_ci95[&2];
        assert!((low - (0.5 - half)).abs() < 0.01, "{low}");
        assert!((high - (0.5 + half)).abs() < 0.01, "{high}");
        // Which is twice as wide as that of pass@1, whose tasks are at 0 or a half.
        assert!(report.ci95[1] < 0.3, "{:?}", report.ci95);
    }

    #[test]
    fn nothing_scored_is_zero_of_zero_tasks() {
        let report = EvalReport::new(vec![score(1, 0, 0, 3)], &[1], 0);
        assert_eq!(
            (report.tasks, report.pass_at_1, report.ci95),
            (0, 0.0, [0.0, 0.0])
        );
        assert!(report.pass_at.is_empty());
    }

    #[test]
    fn the_interval_depends_on_the_seed_alone() {
        let scores = |n: u32| {
            (0..20)
                .map(|id| score(id, n, id * id % n, 0))
                .collect::<Vec<_>>()
        };
        let report = |seed| EvalReport::new(scores(997), &[1], seed);
        assert_eq!(report(7), report(7));
        assert_ne!(report(7).ci95, report(8).ci95);
    }

    #[test]
    fn the_interval_has_the_normal_width() {
        // One sample each at rate 0.3: the normal interval is 0.3 ± 1.96 √(0.21 / tasks).
        let scores = (0..200)
            .map(|id| score(id, 1, u32::from(id % 10 < 3), 0))
            .collect();
        let report = EvalReport::new(scores, &[1], 7);
        let half = 1.96 * (0.21_f64 / 200.0).sqrt();
        assert!(
            (report.ci95[0] - (0.3 - half)).abs() < 0.006,
            "{:?}",
            report.ci95
        );
        assert!(
            (report.ci95[1] - (0.3 + half)).abs() < 0.006,
            "{:?}",
            report.ci95
        );
    }

    /// `statsmodels.stats.proportion.proportion_confint(0, 160, method="wilson")` -> (0, 0.0234466)
    #[test]
    fn tasks_that_are_all_alike_leave_a_doubt() {
        let of = |tasks: u32, n, c| {
            let scores = (0..tasks).map(|id| score(id, n, c, 0)).collect();
            EvalReport::new(scores, &[1], 0).ci95
        };
        let none = of(160, 4, 0);
        assert!(
            none[0] == 0.0 && (none[1] - 0.023_446_6).abs() < 1e-6,
            "{none:?}"
        );
        let all = of(160, 1, 1);
        assert!(
            (all[0] - (1.0 - 0.023_446_6)).abs() < 1e-6 && all[1] == 1.0,
            "{all:?}"
        );
        // One task says little, however many samples it has.
        let one = of(1, 1000, 0);
        assert!((one[1] - 0.793_450_7).abs() < 1e-6, "{one:?}");
    }

    #[test]
    fn the_interval_is_over_tasks_and_not_over_samples() {
        // Two tasks of 1000 samples each: whatever the samples say, the choice of tasks is open.
        let report = EvalReport::new(vec![score(1, 1000, 0, 0), score(2, 1000, 1000, 0)], &[1], 1);
        assert_eq!((report.pass_at_1, report.ci95), (0.5, [0.0, 1.0]));
    }

    #[test]
    fn a_difference_pairs_the_tasks() {
        // Tasks differ a lot, but each one gains exactly one sample in ten.
        let before: Vec<_> = (0..100).map(|id| score(id, 10, id % 10, 0)).collect();
        let after: Vec<_> = (0..100)
            .map(|id| score(id, 10, id % 10 + 1, 0))
            .rev()
            .collect();
        let before = EvalReport::new(before, &[1], 0);
        let mut after = EvalReport::new(after, &[1], 0);
        let change = after.difference(&before, 0).unwrap();
        assert_eq!(change.tasks, 100);
        assert!((change.pass_at_1 - 0.1).abs() < 1e-12);
        assert!(
            (change.ci95[1] - change.ci95[0]).abs() < 1e-12,
            "{change:?}"
        );
        assert!(after.ci95[1] - after.ci95[0] > 0.1);
        // 100 changes of one sign: no draw of the signs does as well.
        assert_eq!(change.p_value, 1e-4);
        after.scores.clear();
        assert_eq!(after.difference(&before, 0), None);
    }

    #[test]
    fn the_paired_test_is_the_exact_one_where_it_can_be() {
        // 4 of the 16 signs do as well.
        assert_eq!(sign_flip_p_value(&[0.5, 0.5, 0.5, -0.25], 0), 0.25);
        assert_eq!(sign_flip_p_value(&[1.0; 6], 0), 2.0 / 64.0);
        // What did not change says nothing of the direction.
        assert_eq!(sign_flip_p_value(&[0.0, 1.0, 0.0, 1.0], 0), 0.5);
        assert_eq!(sign_flip_p_value(&[0.0], 0), 1.0);
        // More are drawn: 20 of 30 of one size are up, 2 P(X >= 20) = 0.0987 for X of Binomial(30, 1/2).
        let changes: Vec<f64> = (0..30).map(|i| if i < 20 { 0.25 } else { -0.25 }).collect();
        let drawn = sign_flip_p_value(&changes, 3);
        assert!((drawn - 0.0987).abs() < 0.01, "{drawn}");
    }

    #[test]
    fn percentiles_interpolate_as_numpy_does() {
        // np.percentile([1, 2, 4, 8], [2.5, 97.5]) -> [1.075, 7.7]
        let values = [1.0, 2.0, 4.0, 8.0];
        assert!((percentile(&values, 25) - 1.075).abs() < 1e-12);
        assert!((percentile(&values, 975) - 7.7).abs() < 1e-12);
        assert_eq!(percentile(&[3.0], 975), 3.0);
    }

    #[test]
    fn a_report_has_the_documented_shape() {
        let report = EvalReport::new(vec![score(602, 2, 1, 0), score(603, 2, 0, 0)], &[1, 2], 0);
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            r#"{"pass_at_1":0.25,"ci95":[0.0,0.5],"tasks":2,"samples":4,"unscorable":0,"pass_at":{"1":0.25,"2":0.5},"pass_at_ci95":{"1":[0.0,0.5],"2":[0.0,1.0]},"pass_at_tasks":{"1":2,"2":2},"scores":[{"task_id":"602","n":2,"c":1,"unscorable":0},{"task_id":"603","n":2,"c":0,"unscorable":0}]}"#
        );
        let read: EvalReport =
            serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(read, report);
        // As it was before intervals were told for each k.
        let earlier = r#"{"pass_at_1":0.5,"ci95":[0.5,0.5],"tasks":1,"samples":2,"unscorable":0,"pass_at":{"1":0.5},"scores":[]}"#;
        let read: EvalReport = serde_json::from_str(earlier).unwrap();
        assert_eq!((read.pass_at[&1], read.pass_at_ci95.len()), (0.5, 0));
    }
}
