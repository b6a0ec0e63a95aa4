//! Line charts as SVG.

use serde::Serialize;

/// The width of a chart's plane, in units of the drawing.
const WIDTH: f64 = 320.0;
/// The height of a chart's plane.
const HEIGHT: f64 = 120.0;
/// The points of a line that are drawn; more are averaged in groups.
const MAX_POINTS: usize = 320;

/// A value at a step, with the interval it lies in where one is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) step: f64,
    pub(super) value: f64,
    pub(super) interval: Option<[f64; 2]>,
}

/// A named line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<Point>,
}

/// What the page draws: coordinates from the top left of a plane of 320 x 120.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Chart {
    title: String,
    lines: Vec<Drawn>,
    ticks: Vec<Tick>,
    first: f64,
    last: f64,
}

#[derive(Debug, PartialEq, Serialize)]
struct Drawn {
    name: String,
    /// `x,y x,y …`.
    points: String,
    /// Intervals: `[x, y of the low end, y of the high end]`.
    whiskers: Vec<[f64; 3]>,
    last: String,
}

#[derive(Debug, PartialEq, Serialize)]
struct Tick {
    y: f64,
    label: String,
}

impl Chart {
    /// Draws `lines`, or returns `None` where they have no finite value.
    pub(super) fn new(title: &str, lines: &[Line]) -> Option<Self> {
        let points = || lines.iter().flat_map(|line| &line.points);
        let steps = Range::of(points().map(|point| point.step))?;
        let values = Range::of(points().flat_map(|point| {
            let ends = point.interval.unwrap_or([point.value; 2]);
            [point.value, ends[0], ends[1]]
        }))?;
        let values = values.widened();
        let x = |step: f64| round(steps.share(step) * WIDTH);
        let y = |value: f64| round((1.0 - values.share(value)) * HEIGHT);
        let drawn = |line: &Line| {
            let finite = |point: &&Point| point.value.is_finite();
            let points: Vec<Point> = line.points.iter().filter(finite).copied().collect();
            let last = points.last()?;
            Some(Drawn {
                name: line.name.clone(),
                points: (thinned(&points).iter())
                    .map(|(step, value)| format!("{},{}", x(*step), y(*value)))
                    .collect::<Vec<_>>()
                    .join(" "),
                whiskers: (points.iter())
                    .filter_map(|point| {
                        let [low, high] = point.interval?;
                        Some([x(point.step), y(low), y(high)])
                    })
                    .collect(),
                last: label(last.value),
            })
        };
        Some(Self {
            title: title.to_owned(),
            lines: lines.iter().filter_map(drawn).collect(),
            ticks: [0.0, 0.5, 1.0]
                .map(|share| values.low + share * (values.high - values.low))
                .map(|value| Tick {
                    y: y(value),
                    label: label(value),
                })
                .into(),
            first: steps.low,
            last: steps.high,
        })
    }
}

/// The finite values from `low` to `high`.
#[derive(Debug, Clone, Copy)]
struct Range {
    low: f64,
    high: f64,
}

impl Range {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut finite = values.filter(|value| value.is_finite());
        let first = finite.next()?;
        let start = Self {
            low: first,
            high: first,
        };
        Some(finite.fold(start, |range, value| Self {
            low: range.low.min(value),
            high: range.high.max(value),
        }))
    }

    /// Gives a line that never changes some room, and one that does not start at 0 a zero where that
    /// costs little: a curve should not look steep for want of its base.
    fn widened(self) -> Self {
        let Self { mut low, mut high } = self;
        if low > 0.0 && low < 0.5 * high {
            low = 0.0;
        }
        if high - low < 1e-12_f64.max(1e-9 * high.abs()) {
            let room = if high == 0.0 { 1.0 } else { 0.1 * high.abs() };
            low -= room;
            high += room;
        }
        Self { low, high }
    }

    fn share(self, value: f64) -> f64 {
        if self.high > self.low {
            (value - self.low) / (self.high - self.low)
        } else {
            0.5
        }
    }
}

/// Averages neighbours until at most [`MAX_POINTS`] are left.
fn thinned(points: &[Point]) -> Vec<(f64, f64)> {
    let group = points.len().div_ceil(MAX_POINTS).max(1);
    points
        .chunks(group)
        .map(|chunk| {
            let mean = |value: &dyn Fn(&Point) -> f64| {
                chunk.iter().map(value).sum::<f64>() / chunk.len() as f64
            };
            (mean(&|point| point.step), mean(&|point| point.value))
        })
        .collect()
}

fn round(coordinate: f64) -> f64 {
    (coordinate * 10.0).round() / 10.0
}

/// Returns a value as a person reads it, with three digits that matter.
fn label(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if !(1e-3..1e6).contains(&magnitude) {
        format!("{value:.1e}")
    } else {
        let decimals = (2.0 - magnitude.log10().floor()).clamp(0.0, 6.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 6"
        )]
        let text = format!("{value:.*}", decimals as usize);
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(values: &[f64]) -> Line {
        let point = |(step, value): (usize, &f64)| Point {
            step: step as f64,
            value: *value,
            interval: None,
        };
        Line {
            name: "reward".to_owned(),
            points: values.iter().enumerate().map(point).collect(),
        }
    }

    #[test]
    fn a_line_spans_the_plane() {
        let chart = Chart::new("reward", &[line(&[0.0, 0.5, 1.0])]).unwrap();
        assert_eq!(chart.lines[0].points, "0,120 160,60 320,0");
        let labels: Vec<&str> = chart.ticks.iter().map(|tick| tick.label.as_str()).collect();
        assert_eq!(labels, ["0", "0.5", "1"]);
        assert_eq!((chart.first, chart.last), (0.0, 2.0));
    }

    #[test]
    fn what_is_not_finite_is_left_out() {
        let chart = Chart::new("loss", &[line(&[f64::NAN, 1.0, f64::INFINITY, 2.0])]).unwrap();
        assert_eq!(chart.lines[0].points, "106.7,120 320,0");
        assert_eq!(Chart::new("loss", &[line(&[f64::NAN])]), None);
        assert_eq!(Chart::new("loss", &[]), None);
    }

    #[test]
    fn a_flat_line_lies_in_the_middle() {
        let chart = Chart::new("rate", &[line(&[3e-4, 3e-4])]).unwrap();
        assert_eq!(chart.lines[0].points, "0,60 320,60");
        assert_eq!(chart.lines[0].last, "3.0e-4");
    }

    #[test]
    fn long_lines_are_averaged() {
        let values: Vec<f64> = (0..1000).map(f64::from).collect();
        let chart = Chart::new("long", &[line(&values)]).unwrap();
        assert_eq!(chart.lines[0].points.split(' ').count(), 250);
        assert_eq!(chart.lines[0].last, "999");
    }

    #[test]
    fn labels_are_short() {
        let cases = [
            (0.0, "0"),
            (0.5, "0.5"),
            (-0.0312, "-0.0312"),
            (12.3456, "12.3"),
            (10247.9, "10248"),
            (2.5e-9, "2.5e-9"),
            (3.2e7, "3.2e7"),
        ];
        for (value, text) in cases {
            assert_eq!(label(value), text);
        }
    }
}
