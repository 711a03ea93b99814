//! What a check reports.

use serde::Serialize;

/// The state of what was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It works.
    Ok,
    /// It works, with a consequence.
    Limited,
    /// It does not work here.
    Missing,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
        }
    }
}

/// The result of a check.
#[derive(Debug, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub state: State,
    /// Whether no program works without it.
    pub is_necessary: bool,
    /// What was found, and what follows.
    pub meaning: String,
    /// What to do; `None` if there is nothing to do.
    pub advice: Option<String>,
}

impl Check {
    pub fn ok(name: &'static str, meaning: impl Into<String>) -> Check {
        Check { name, state: State::Ok, is_necessary: false, meaning: meaning.into(), advice: None }
    }

    pub fn limited(name: &'static str, meaning: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { state: State::Limited, advice: Some(advice.into()), ..Check::ok(name, meaning) }
    }

    pub fn missing(name: &'static str, meaning: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { state: State::Missing, advice: Some(advice.into()), ..Check::ok(name, meaning) }
    }

    /// The same, of something that every program needs.
    pub fn necessary(self) -> Check {
        Check { is_necessary: true, ..self }
    }

    /// Whether programs can run in spite of it.
    pub fn permits_programs(&self) -> bool {
        !self.is_necessary || self.state != State::Missing
    }
}
