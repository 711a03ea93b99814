//! The font of the plots. It is a font of the machine, because a font would be the largest file of the repository.

use std::path::Path;
use std::sync::OnceLock;

use plotters::style::{FontStyle, register_font};

const CANDIDATES: [&str; 5] = [
    "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
    "/usr/share/fonts/dejavu-sans-fonts/DejaVuSans.ttf",
    "/usr/share/fonts/TTF/DejaVuSans.ttf",
    "/usr/share/fonts/truetype/liberation/LiberationSans-Regular.ttf",
    "/usr/share/fonts/truetype/noto/NotoSans-Regular.ttf",
];

/// No font was found.
#[derive(Clone, Debug, thiserror::Error)]
#[error("no font for the plots: install Debian's fonts-dejavu-core (none of {tried})")]
pub struct FontError {
    tried: String,
}

/// Loads the font, once per process. Call it before long measurements.
pub fn load_font() -> Result<(), FontError> {
    static LOADED: OnceLock<Result<(), FontError>> = OnceLock::new();
    LOADED.get_or_init(|| load(&CANDIDATES)).clone()
}

fn load(candidates: &[&str]) -> Result<(), FontError> {
    for path in candidates {
        if let Ok(bytes) = std::fs::read(Path::new(path)) {
            // The library requires fonts with static lifetime.
            if register_font("sans-serif", FontStyle::Normal, Box::leak(bytes.into_boxed_slice())).is_ok() {
                return Ok(());
            }
        }
    }
    Err(FontError { tried: candidates.join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_font_the_error_names_the_package() {
        let message = load(&["/nowhere/font.ttf", "/etc/passwd"]).unwrap_err().to_string();
        assert!(message.contains("fonts-dejavu-core") && message.contains("/nowhere/font.ttf"), "{message}");
    }
}
