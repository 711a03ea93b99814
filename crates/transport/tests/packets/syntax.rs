//! Lines of a packet script: words, `key=value` fields, and the small languages for numbers, times and data.

use std::collections::BTreeMap;

use crate::support::host::pattern;

/// Names that numbers may refer to, such as `mtu`.
pub type Variables = BTreeMap<String, u64>;

/// One line of a script while it is parsed. Words left over at [`Line::finish`] are an error in the script.
#[derive(Clone, Debug)]
pub struct Line {
    words: Vec<String>,
    fields: BTreeMap<String, String>,
    variables: Variables,
}

impl Line {
    pub fn new(text: &str, variables: &Variables) -> Result<Line, String> {
        let mut line = Line { words: Vec::new(), fields: BTreeMap::new(), variables: variables.clone() };
        for token in text.split_whitespace() {
            match token.split_once('=') {
                Some((key, value)) => {
                    if line.fields.insert(key.to_owned(), value.to_owned()).is_some() {
                        return Err(format!("{key} is given twice"));
                    }
                }
                None => line.words.push(token.to_owned()),
            }
        }
        Ok(line)
    }

    /// The next word, which must be there.
    pub fn word(&mut self, what: &str) -> Result<String, String> {
        self.optional_word().ok_or_else(|| format!("{what} is missing"))
    }

    pub fn optional_word(&mut self) -> Option<String> {
        if self.words.is_empty() { None } else { Some(self.words.remove(0)) }
    }

    /// Takes this word at any position.
    pub fn flag(&mut self, name: &str) -> bool {
        let found = self.words.iter().position(|word| word == name);
        found.map(|index| self.words.remove(index)).is_some()
    }

    pub fn text(&mut self, key: &str) -> Option<String> {
        self.fields.remove(key)
    }

    pub fn number(&mut self, key: &str) -> Result<Option<u64>, String> {
        self.text(key).map(|text| self.evaluate(&text)).transpose()
    }

    pub fn number_or(&mut self, key: &str, default: u64) -> Result<u64, String> {
        Ok(self.number(key)?.unwrap_or(default))
    }

    /// A number that must fit a narrower type.
    pub fn small<T: TryFrom<u64>>(&mut self, key: &str, default: T) -> Result<T, String> {
        match self.number(key)? {
            Some(number) => T::try_from(number).map_err(|_| format!("{key} is too large")),
            None => Ok(default),
        }
    }

    /// `FIRST..LAST`, both included, or one number.
    pub fn range(&mut self, key: &str) -> Result<Option<(u64, u64)>, String> {
        let Some(text) = self.text(key) else { return Ok(None) };
        let (first, last) = text.split_once("..").unwrap_or((&text, &text));
        Ok(Some((self.evaluate(first)?, self.evaluate(last)?)))
    }

    pub fn finish(self) -> Result<(), String> {
        let fields = self.fields.keys().map(|key| format!("{key}="));
        match self.words.into_iter().chain(fields).next() {
            Some(unknown) => Err(format!("{unknown} means nothing here")),
            None => Ok(()),
        }
    }

    /// Sums and differences of products: `2*mtu+1`, `0x1000`, `mtu-1`.
    pub fn evaluate(&self, text: &str) -> Result<u64, String> {
        let mut total = 0u64;
        let mut rest = text;
        let mut minus = false;
        loop {
            let end = rest.find(['+', '-']).unwrap_or(rest.len());
            let term = self.product(&rest[..end])?;
            total = if minus { total.wrapping_sub(term) } else { total.wrapping_add(term) };
            let Some(sign) = rest[end..].chars().next() else { return Ok(total) };
            minus = sign == '-';
            rest = &rest[end + 1..];
        }
    }

    fn product(&self, text: &str) -> Result<u64, String> {
        text.split('*').try_fold(1u64, |product, factor| Ok(product.wrapping_mul(self.factor(factor)?)))
    }

    fn factor(&self, text: &str) -> Result<u64, String> {
        if let Some(value) = self.variables.get(text) {
            return Ok(*value);
        }
        let parsed = match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        };
        parsed.map_err(|_| format!("{text:?} is not a number"))
    }

    /// `ADDRESS:LENGTH`
    pub fn span(&self, text: &str) -> Result<(u64, u64), String> {
        let (addr, len) = text.split_once(':').ok_or_else(|| format!("{text:?} is not ADDRESS:LENGTH"))?;
        Ok((self.evaluate(addr)?, self.evaluate(len)?))
    }

    /// `@ADDRESS:LENGTH`, `u64:VALUE`, `x:HEX`, `LENGTH*VALUE` or `empty`.
    pub fn data(&self, text: &str) -> Result<Vec<u8>, String> {
        if let Some(span) = text.strip_prefix('@') {
            let (addr, len) = self.span(span)?;
            return Ok((addr..addr + len).map(pattern).collect());
        }
        if let Some(value) = text.strip_prefix("u64:") {
            return Ok(self.evaluate(value)?.to_ne_bytes().to_vec());
        }
        if let Some(hex) = text.strip_prefix("x:") {
            let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap_or(""));
            return digits
                .map(|pair| u8::from_str_radix(pair, 16).map_err(|_| format!("{hex:?} is not hex")))
                .collect();
        }
        if text == "empty" {
            return Ok(Vec::new());
        }
        let (len, value) = text.rsplit_once('*').ok_or_else(|| format!("{text:?} is not data"))?;
        Ok(vec![self.evaluate(value)? as u8; self.evaluate(len)? as usize])
    }

    /// The data of a later packet of a range: addresses move by the length per step, everything else stays.
    pub fn data_at_step(&self, text: &str, step: u64) -> Result<Vec<u8>, String> {
        let Some(span) = text.strip_prefix('@') else { return self.data(text) };
        let (addr, len) = self.span(span)?;
        let start = addr + step * len;
        Ok((start..start + len).map(pattern).collect())
    }
}

/// A time in nanoseconds: a number with `ns`, `us`, `ms` or `s`.
pub fn duration_ns(text: &str) -> Result<u64, String> {
    for (unit, ns) in [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)] {
        if let Some(number) = text.strip_suffix(unit)
            && let Ok(value) = number.parse::<f64>()
        {
            return Ok((value * ns).round() as u64);
        }
    }
    Err(format!("{text:?} is not a time"))
}
