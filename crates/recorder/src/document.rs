//! The part of a period that is recorded, as JSON text with the position of each value in it. The recorder need not parse the
//! text again.

use std::io::{self, Write};

use serde::Serialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::ser::{CharEscape, CompactFormatter, Formatter, Serializer};

use crate::schema::Kind;

/// The precision with which figures are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figures {
    /// With all digits.
    Whole,
    /// With their significant digits only. Among whole numbers only rates are figures; all others are counts, which are kept
    /// exactly. `_max_` rates, such as the bandwidth that a controller can sustain, are not measurements, so they are kept
    /// exactly too.
    Short,
}

/// Number of significant digits of a short figure.
const DIGITS: u32 = 3;

/// Index of a value among the tokens of a document.
pub(crate) type Place = usize;

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A whole number, which may not fit into 64 bits.
    Whole,
    Text,
    /// Null, true, false, or a number that is not whole.
    Other,
    List,
    Object,
}

/// A value in a document. If it is a list or an object, the tokens of its content follow, up to `next`.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub shape: Shape,
    /// Where the value's key begins, if it has one. The key ends with the colon before the value.
    key: u32,
    /// Where the value's text begins and ends.
    begin: u32,
    end: u32,
    /// Index of the first token after the value and its content.
    next: u32,
}

/// A value as JSON text without spaces. The memory is reused for the next value.
#[derive(Debug, Default)]
pub(crate) struct Document {
    text: Vec<u8>,
    tokens: Vec<Token>,
}

impl Document {
    /// Replaces the content with this value.
    ///
    /// # Errors
    /// If the value has no JSON form, for example if its keys are not text. The document is then empty.
    pub(crate) fn write(&mut self, value: &impl Serialize, figures: Figures) -> serde_json::Result<()> {
        self.become_of(figures, |writer| {
            value.serialize(&mut Serializer::with_formatter(io::sink(), writer))
        })
    }

    /// Replaces the content with a parsed JSON text.
    ///
    /// # Errors
    /// If the text is not JSON. The document is then empty.
    pub(crate) fn read(&mut self, text: &[u8]) -> serde_json::Result<()> {
        self.become_of(Figures::Whole, |writer| {
            let mut reader = serde_json::Deserializer::from_slice(text);
            Rest(writer).deserialize(&mut reader)?;
            reader.end()
        })
    }

    fn become_of(
        &mut self,
        figures: Figures,
        of: impl FnOnce(&mut Writer<'_>) -> serde_json::Result<()>,
    ) -> serde_json::Result<()> {
        self.clear();
        let made = of(&mut Writer {
            document: self,
            figures,
            open: Vec::new(),
            key: None,
            is_in_key: false,
            is_rate: false,
        });
        let is_small = u32::try_from(self.text.len()).is_ok();
        let made = match is_small {
            true => made,
            false => Err(serde::ser::Error::custom("more than 4 GiB of text")),
        };
        if made.is_err() {
            self.clear();
        }
        made
    }

    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.tokens.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the whole text.
    pub(crate) fn text(&self) -> &[u8] {
        &self.text
    }

    pub(crate) fn shape(&self, at: Place) -> Shape {
        self.tokens[at].shape
    }

    /// Returns the text of a value.
    pub(crate) fn value(&self, at: Place) -> &[u8] {
        let Token { begin, end, .. } = self.tokens[at];
        &self.text[begin as usize..end as usize]
    }

    /// Returns the text of a value's key; empty if it has none.
    fn key(&self, at: Place) -> &[u8] {
        let Token { key, begin, .. } = self.tokens[at];
        self.text[key as usize..begin as usize]
            .strip_suffix(b":")
            .unwrap_or_default()
    }

    /// Returns a value if it is a whole number that fits into 64 bits.
    pub(crate) fn whole(&self, at: Place) -> Option<i64> {
        let is_whole = self.shape(at) == Shape::Whole;
        is_whole.then(|| std::str::from_utf8(self.value(at)).ok()?.parse().ok())?
    }

    /// Returns the places of the values in a list or an object.
    pub(crate) fn items(&self, at: Place) -> impl Iterator<Item = Place> {
        let end = self.tokens[at].next as usize;
        let next = move |at: Place| (at < end).then_some(at);
        std::iter::successors(next(at + 1), move |at| next(self.tokens[*at].next as usize))
    }

    /// Returns the keys of an object as JSON texts, each with the place of its value.
    pub(crate) fn fields(&self, at: Place) -> impl Iterator<Item = (&[u8], Place)> {
        self.items(at).map(|at| (self.key(at), at))
    }

    /// Returns the `id` of an object as a JSON text; `None` if it has none.
    pub(crate) fn id(&self, at: Place) -> Option<&[u8]> {
        if self.shape(at) != Shape::Object {
            return None;
        }
        let (_, id) = self.fields(at).find(|(key, _)| *key == br#""id""#)?;
        (self.shape(id) == Shape::Text).then(|| self.value(id))
    }
}

/// The documents of one period.
#[derive(Debug, Default)]
pub struct Documents {
    all: [Document; Kind::ALL.len()],
    failed: Option<serde_json::Error>,
}

impl Documents {
    /// Keeps this value. If the value has no JSON form, the period is recorded without it, and the error is reported like a disk
    /// error.
    pub fn put(&mut self, kind: Kind, figures: Figures, value: &impl Serialize) {
        if let Err(error) = self.all[kind.index()].write(value, figures) {
            self.failed = Some(error);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.all.iter_mut().for_each(Document::clear);
        self.failed = None;
    }

    /// Returns the documents that are not empty.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Kind, &Document)> {
        let all = Kind::ALL.into_iter().zip(&self.all);
        all.filter(|(_, document)| !document.is_empty())
    }

    pub(crate) fn failed(&self) -> Option<&serde_json::Error> {
        self.failed.as_ref()
    }
}

/// Appends tokens and text to a document.
struct Writer<'a> {
    document: &'a mut Document,
    figures: Figures,
    /// Lists and objects that are still open.
    open: Vec<Place>,
    /// Where the key of the next value begins.
    key: Option<u32>,
    is_in_key: bool,
    /// Whether the next value is a rate, which counts as a figure even if it has no decimal point.
    is_rate: bool,
}

/// Converts a position. A position that is too large is rejected when the document is complete.
fn narrow(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

impl Writer<'_> {
    fn token(&mut self, shape: Shape, begin: usize) {
        let begin = narrow(begin);
        let tokens = &mut self.document.tokens;
        tokens.push(Token {
            shape,
            key: self.key.take().unwrap_or(begin),
            begin,
            end: narrow(self.document.text.len()),
            next: narrow(tokens.len() + 1),
        });
    }

    /// Writes a value that has no content of its own. A number may also be a key.
    fn scalar(&mut self, shape: Shape, write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> io::Result<()> {
        let begin = self.document.text.len();
        write(&mut self.document.text)?;
        if !self.is_in_key {
            self.token(shape, begin);
        }
        Ok(())
    }

    fn whole(&mut self, value: i64) -> io::Result<()> {
        self.scalar(Shape::Whole, |text| CompactFormatter.write_i64(text, value))
    }

    fn large(&mut self, value: u64) -> io::Result<()> {
        let is_figure = self.is_rate && self.figures == Figures::Short && !self.is_in_key;
        let value = if is_figure { short_whole(value) } else { value };
        self.scalar(Shape::Whole, |text| CompactFormatter.write_u64(text, value))
    }

    fn figure(&mut self, value: f64) -> io::Result<()> {
        let value = match self.figures {
            Figures::Short => short_figure(value),
            Figures::Whole => value,
        };
        self.scalar(Shape::Other, |text| CompactFormatter.write_f64(text, value))
    }

    fn word(&mut self, word: &str) -> io::Result<()> {
        self.scalar(Shape::Other, |text| text.write_all(word.as_bytes()))
    }

    fn begin(&mut self, shape: Shape, sign: u8) {
        self.open.push(self.document.tokens.len());
        self.token(shape, self.document.text.len());
        self.document.text.push(sign);
    }

    fn end(&mut self, sign: u8) {
        self.document.text.push(sign);
        let Some(at) = self.open.pop() else { return };
        let next = narrow(self.document.tokens.len());
        let token = &mut self.document.tokens[at];
        (token.end, token.next) = (narrow(self.document.text.len()), next);
    }

    fn separate(&mut self, is_first: bool) {
        if !is_first {
            self.document.text.push(b',');
        }
    }

    /// Writes a comma, unless the last character opens a list or an object, or ends a key.
    fn separate_from_last(&mut self) {
        let last = self.document.text.last();
        self.separate(matches!(last, None | Some(b'[' | b'{' | b':')));
    }

    fn begin_key(&mut self) {
        self.key = Some(narrow(self.document.text.len()));
        self.is_in_key = true;
    }

    fn end_key(&mut self) {
        self.is_in_key = false;
        if self.figures == Figures::Short {
            let key = self.key.map(|begin| &self.document.text[begin as usize..]);
            let key = key.unwrap_or_default();
            self.is_rate = key.ends_with(b"_per_s\"") && !key.windows(5).any(|part| part == b"_max_");
        }
        self.document.text.push(b':');
    }
}

/// Writes everything to the document, and ignores the serializer's own writer.
impl Formatter for &mut Writer<'_> {
    fn write_null<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.word("null")
    }

    fn write_bool<W: Write + ?Sized>(&mut self, _: &mut W, value: bool) -> io::Result<()> {
        self.word(if value { "true" } else { "false" })
    }

    fn write_i8<W: Write + ?Sized>(&mut self, _: &mut W, value: i8) -> io::Result<()> {
        self.whole(value.into())
    }

    fn write_i16<W: Write + ?Sized>(&mut self, _: &mut W, value: i16) -> io::Result<()> {
        self.whole(value.into())
    }

    fn write_i32<W: Write + ?Sized>(&mut self, _: &mut W, value: i32) -> io::Result<()> {
        self.whole(value.into())
    }

    fn write_i64<W: Write + ?Sized>(&mut self, _: &mut W, value: i64) -> io::Result<()> {
        self.whole(value)
    }

    fn write_i128<W: Write + ?Sized>(&mut self, _: &mut W, value: i128) -> io::Result<()> {
        self.scalar(Shape::Whole, |text| CompactFormatter.write_i128(text, value))
    }

    fn write_u8<W: Write + ?Sized>(&mut self, _: &mut W, value: u8) -> io::Result<()> {
        self.large(value.into())
    }

    fn write_u16<W: Write + ?Sized>(&mut self, _: &mut W, value: u16) -> io::Result<()> {
        self.large(value.into())
    }

    fn write_u32<W: Write + ?Sized>(&mut self, _: &mut W, value: u32) -> io::Result<()> {
        self.large(value.into())
    }

    fn write_u64<W: Write + ?Sized>(&mut self, _: &mut W, value: u64) -> io::Result<()> {
        self.large(value)
    }

    fn write_u128<W: Write + ?Sized>(&mut self, _: &mut W, value: u128) -> io::Result<()> {
        self.scalar(Shape::Whole, |text| CompactFormatter.write_u128(text, value))
    }

    fn write_f32<W: Write + ?Sized>(&mut self, _: &mut W, value: f32) -> io::Result<()> {
        self.scalar(Shape::Other, |text| CompactFormatter.write_f32(text, value))
    }

    fn write_f64<W: Write + ?Sized>(&mut self, _: &mut W, value: f64) -> io::Result<()> {
        self.figure(value)
    }

    fn write_number_str<W: Write + ?Sized>(&mut self, _: &mut W, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn begin_string<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        if !self.is_in_key {
            self.begin(Shape::Text, b'"');
            return Ok(());
        }
        self.document.text.push(b'"');
        Ok(())
    }

    fn end_string<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        if !self.is_in_key {
            self.end(b'"');
            return Ok(());
        }
        self.document.text.push(b'"');
        Ok(())
    }

    fn write_string_fragment<W: Write + ?Sized>(&mut self, _: &mut W, fragment: &str) -> io::Result<()> {
        self.document.text.write_all(fragment.as_bytes())
    }

    fn write_char_escape<W: Write + ?Sized>(&mut self, _: &mut W, escape: CharEscape) -> io::Result<()> {
        CompactFormatter.write_char_escape(&mut self.document.text, escape)
    }

    fn begin_array<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_rate = false;
        self.begin(Shape::List, b'[');
        Ok(())
    }

    fn end_array<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.end(b']');
        Ok(())
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, _: &mut W, is_first: bool) -> io::Result<()> {
        self.separate(is_first);
        Ok(())
    }

    fn begin_object<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.begin(Shape::Object, b'{');
        Ok(())
    }

    fn end_object<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.end(b'}');
        Ok(())
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, _: &mut W, is_first: bool) -> io::Result<()> {
        self.separate(is_first);
        self.begin_key();
        Ok(())
    }

    fn end_object_key<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.end_key();
        Ok(())
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        Ok(())
    }

    fn write_raw_fragment<W: Write + ?Sized>(&mut self, _: &mut W, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Reads the next value into a document, or reads the text of a key.
struct Rest<'a, 'd>(&'a mut Writer<'d>);

/// Converts an error of a document to the deserializer's. Values that can be read do not cause any.
fn refused<E: serde::de::Error>(error: io::Error) -> E {
    E::custom(error)
}

impl<'de> DeserializeSeed<'de> for Rest<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        self.0.separate_from_last();
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Rest<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.0.word("null").map_err(refused)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        let word = if value { "true" } else { "false" };
        self.0.word(word).map_err(refused)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.0.whole(value).map_err(refused)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.0.large(value).map_err(refused)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.0.figure(value).map_err(refused)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        let write = |to: &mut Vec<u8>| serde_json::to_writer(to, text).map_err(io::Error::from);
        self.0.scalar(Shape::Text, write).map_err(refused)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.begin(Shape::List, b'[');
        while items.next_element_seed(Rest(self.0))?.is_some() {}
        self.0.end(b']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        self.0.begin(Shape::Object, b'{');
        while fields.next_key_seed(Key(self.0))?.is_some() {
            fields.next_value_seed(Rest(self.0))?;
        }
        self.0.end(b'}');
        Ok(())
    }
}

/// Reads the next key into a document.
struct Key<'a, 'd>(&'a mut Writer<'d>);

impl<'de> DeserializeSeed<'de> for Key<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        self.0.separate_from_last();
        self.0.begin_key();
        from.deserialize_any(Rest(self.0))?;
        self.0.end_key();
        Ok(())
    }
}

/// Rounds a whole number down to the significant digits.
fn short_whole(number: u64) -> u64 {
    let digits = number.checked_ilog10().map_or(1, |places| places + 1);
    let unit = 10_u64.pow(digits.saturating_sub(DIGITS));
    number / unit * unit
}

/// Rounds a figure to the significant digits.
fn short_figure(full: f64) -> f64 {
    /// The largest exact power of ten. Dividing by an exact power gives the number nearest to the decimals.
    const EXACT_MAX: i32 = 22;
    const EXACT_MIN: i32 = -EXACT_MAX;
    let magnitude = full.abs().log10().floor() as i32;
    let places = (DIGITS.cast_signed() - 1).saturating_sub(magnitude);
    match places {
        0..=EXACT_MAX => (full * 10_f64.powi(places)).round() / 10_f64.powi(places),
        EXACT_MIN..0 => (full / 10_f64.powi(-places)).round() * 10_f64.powi(-places),
        // The figure is much smaller or larger than any of a host, or it is 0, which has no magnitude.
        _ => full,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::columns::tests::value;

    /// Rebuilds the value at a place from the tokens.
    fn told(document: &Document, at: Place) -> Value {
        match document.shape(at) {
            Shape::List => document.items(at).map(|item| told(document, item)).collect(),
            Shape::Object => {
                let field = |(key, at)| (serde_json::from_slice::<String>(key).unwrap(), told(document, at));
                Value::Object(document.fields(at).map(field).collect())
            }
            Shape::Whole | Shape::Text | Shape::Other => serde_json::from_slice(document.value(at)).unwrap(),
        }
    }

    #[test]
    fn keys_that_are_no_texts_are_written_as_such_or_refused() {
        let mut document = Document::default();
        let by_number = std::collections::BTreeMap::from([(7u16, "a\"b\n"), (8, "")]);
        document.write(&by_number, Figures::Short).unwrap();
        assert_eq!(told(&document, 0), json!({"7": "a\"b\n", "8": ""}));
        let by_pair = std::collections::BTreeMap::from([((1, 2), 3)]);
        assert!(document.write(&by_pair, Figures::Short).is_err() && document.is_empty());
    }

    proptest! {
        #[test]
        fn text_and_tokens_say_what_was_written_and_what_was_read(value in value()) {
            let (mut written, mut read) = (Document::default(), Document::default());
            written.write(&value, Figures::Whole).unwrap();
            prop_assert_eq!(written.text(), serde_json::to_vec(&value).unwrap());
            prop_assert_eq!(told(&written, 0), value.clone());
            read.read(written.text()).unwrap();
            prop_assert_eq!(read.text(), written.text());
            prop_assert_eq!(told(&read, 0), value);
        }
    }

    fn kept(value: &Value) -> Value {
        let mut document = Document::default();
        document.write(value, Figures::Short).unwrap();
        serde_json::from_slice(document.text()).unwrap()
    }

    #[test]
    fn figures_keep_three_digits_and_counts_all_of_them() {
        let value = json!({"a": [0.123_456, 123_456.7, 1.234e-9, 0.0, -9.996], "n": 123_456_789_012_u64, "t": "0.123456"});
        let short =
            json!({"a": [0.123, 123_000.0, 1.23e-9, 0.0, -10.0], "n": 123_456_789_012_u64, "t": "0.123456"});
        assert_eq!(kept(&value), short);
        let rates =
            json!({"bandwidth_bytes_per_s": 1_234_567, "bytes_per_s": 12, "a_max_bytes_per_s": 1_234_567});
        let short =
            json!({"bandwidth_bytes_per_s": 1_230_000, "bytes_per_s": 12, "a_max_bytes_per_s": 1_234_567});
        assert_eq!(kept(&rates), short);
    }
}
