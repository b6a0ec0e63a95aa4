//! The page and its parts, as they are in the binary.

/// The page.
pub(super) const PAGE: &str = include_str!("web/index.html");

/// Returns the content type and the text of a part of the page.
pub(super) fn asset(name: &str) -> Option<(&'static str, &'static str)> {
    const SCRIPT: &str = "text/javascript; charset=utf-8";
    const STYLE: &str = "text/css; charset=utf-8";
    Some(match name {
        "app.css" => (STYLE, include_str!("web/app.css")),
        "app.js" => (SCRIPT, include_str!("web/app.js")),
        "api.js" => (SCRIPT, include_str!("web/api.js")),
        "dom.js" => (SCRIPT, include_str!("web/dom.js")),
        "chart.js" => (SCRIPT, include_str!("web/chart.js")),
        "load.js" => (SCRIPT, include_str!("web/load.js")),
        "runs.js" => (SCRIPT, include_str!("web/runs.js")),
        "rollouts.js" => (SCRIPT, include_str!("web/rollouts.js")),
        _ => return None,
    })
}
