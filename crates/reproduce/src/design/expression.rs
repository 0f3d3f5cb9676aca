//! The expressions of an experiment: `below(speed, speed[system='Xen'])`, `max(loss, program)`.
//!
//! ```text
//!   or      a or b                    (1 where either is not 0)
//!   and     a and b, not a
//!   test    a < b, <=, >, >=, ==, !=
//!   sum     a + b, a - b
//!   product a * b, a / b, a % b, -a
//!   part    a[axis='label'], a[axis=['one', 'two']], a[axis!='label'], a[axis=other]
//!   atom    1.5, 'a word', name, function(a, …), (a)
//! ```
//!
//! If a part selects one label, that axis is dropped. The label may also be an expression, which yields one for each place.
//! There are no variables, loops or user-defined functions. An experiment that needs these names a model in code.
//!
//! *Not used:* an expression crate. Our values are arrays with named axes, and evalexpr and CEL cannot apply operators to
//! our types. Rhai resolves only names that outlive the experiment, divides whole numbers as integers, and reserves `if` and
//! `'`. A parser alone (sqlparser) rejects `a[axis='label']`. And each crate would replace only this file, not the arrays
//! and functions.

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};

/// Maximum number of tokens of an expression, and of nesting levels: parsing and evaluation are recursive.
const TOKENS_MAX: usize = 1_000;
const DEPTH_MAX: u32 = 64;
/// Maximum number of digits in a number: a 64-bit float never needs more than 17.
const DIGITS_MAX: usize = 17;

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expression {
    /// A number.
    Number(f64),
    /// A word.
    Text(String),
    /// Name of a value, a metric or an axis.
    Name(String),
    /// An operator or a function, and its operands.
    Call(String, Vec<Expression>),
    /// A part: the array, the axis, and its labels.
    Part(Box<Expression>, String, Which),
}

/// The labels that a part selects.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Which {
    /// One label, whose axis is dropped.
    One(Box<Expression>),
    /// The labels to keep.
    Some(Vec<String>),
    /// The labels to leave out.
    But(Vec<String>),
}

/// Signs, the longer ones first.
const SIGNS: [&str; 17] = [
    "<=", ">=", "==", "!=", "<", ">", "=", "+", "-", "*", "/", "%", "(", ")", "[", "]", ",",
];

/// Splits a text into numbers, words in quotes, names and signs.
fn tokens(text: &str) -> Result<Vec<&str>> {
    let mut rest = text.trim_start();
    let mut found = Vec::new();
    while let Some(first) = rest.chars().next() {
        let run = |more: fn(char) -> bool| rest.find(|c| !more(c)).unwrap_or(rest.len());
        let length = if first == '\'' {
            rest[1..]
                .find('\'')
                .context("a word in quotes has no closing quote")?
                + 2
        } else if first.is_ascii_digit() {
            run(|c| c.is_ascii_digit() || c == '.')
        } else if is_name(rest) {
            run(|c| c.is_alphanumeric() || c == '_' || c == '.')
        } else {
            let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
            sign.with_context(|| format!("`{first}` has no meaning in an expression"))?
                .len()
        };
        found.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    Ok(found)
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

fn is_number(token: &str) -> bool {
    token.starts_with(|c: char| c.is_ascii_digit())
}

fn number(token: &str) -> Result<f64> {
    token.parse().map_err(|_| anyhow!("`{token}` is not a number"))
}

/// Returns the word of a token in quotes.
fn quoted(token: &str) -> Option<String> {
    Some(token.strip_prefix('\'')?.trim_end_matches('\'').to_owned())
}

/// Operators by precedence, from the lowest to the highest.
const OPERATORS: [&[&str]; 5] = [
    &["or"],
    &["and"],
    &["<", "<=", ">", ">=", "==", "!="],
    &["+", "-"],
    &["*", "/", "%"],
];

/// Precedence level of `not`: lower than that of tests, higher than that of `and`.
const NOT: usize = 2;

struct Parser<'a> {
    tokens: Vec<&'a str>,
    at: usize,
    depth: u32,
}

impl Expression {
    /// Parses an expression.
    ///
    /// # Errors
    /// A message about what is wrong.
    pub(crate) fn parse(text: &str) -> Result<Expression> {
        let wrong = |what: Error| anyhow!("{what} (in `{}`)", text.trim());
        let mut parser = Parser {
            tokens: tokens(text).map_err(wrong)?,
            at: 0,
            depth: 0,
        };
        if parser.tokens.len() > TOKENS_MAX {
            bail!(
                "an expression may have at most {TOKENS_MAX} words and signs: move parts of it to `values`"
            );
        }
        let whole = parser.operation(0).map_err(wrong)?;
        match parser.tokens.get(parser.at) {
            None => Ok(whole),
            Some(token) => Err(wrong(unexpected(token))),
        }
    }

    /// Returns the names that the expression uses.
    pub(crate) fn names(&self) -> Vec<&str> {
        match self {
            Expression::Number(_) | Expression::Text(_) => Vec::new(),
            Expression::Name(name) => vec![name],
            Expression::Call(_, of) => of.iter().flat_map(Expression::names).collect(),
            Expression::Part(of, _, Which::One(which)) => [of.names(), which.names()].concat(),
            Expression::Part(of, ..) => of.names(),
        }
    }
}

fn shown(token: &str) -> String {
    match is_number(token) || token.starts_with('\'') {
        true => token.to_owned(),
        false => format!("`{token}`"),
    }
}

fn unexpected(token: &str) -> Error {
    anyhow!("{} is not expected here", shown(token))
}

impl Parser<'_> {
    fn takes(&mut self, sign: &str) -> bool {
        let is = self.tokens.get(self.at).is_some_and(|own| *own == sign);
        self.at += usize::from(is);
        is
    }

    fn expects(&mut self, sign: &str) -> Result<()> {
        if !self.takes(sign) {
            let found = self
                .tokens
                .get(self.at)
                .map_or("the end".to_owned(), |token| shown(token));
            bail!("`{sign}` is expected before {found}");
        }
        Ok(())
    }

    fn operation(&mut self, level: usize) -> Result<Expression> {
        let Some(operators) = OPERATORS.get(level) else {
            return self.unary();
        };
        if level == NOT && self.takes("not") {
            let of = self.deeper(|parser| parser.operation(level))?;
            return Ok(Expression::Call("not".to_owned(), vec![of]));
        }
        let mut left = self.operation(level + 1)?;
        while let Some(operator) = operators.iter().find(|operator| self.takes(operator)) {
            let right = self.operation(level + 1)?;
            left = Expression::Call((*operator).to_owned(), vec![left, right]);
        }
        Ok(left)
    }

    fn deeper(&mut self, read: impl Fn(&mut Self) -> Result<Expression>) -> Result<Expression> {
        self.depth += 1;
        ensure!(
            self.depth <= DEPTH_MAX,
            "the expression is nested deeper than {DEPTH_MAX} levels"
        );
        let found = read(self);
        self.depth -= 1;
        found
    }

    fn unary(&mut self) -> Result<Expression> {
        if self.takes("-") {
            let of = self.deeper(Self::unary)?;
            return Ok(Expression::Call("minus".to_owned(), vec![of]));
        }
        let mut whole = self.atom()?;
        while self.takes("[") {
            loop {
                whole = self.part(whole)?;
                if !self.takes(",") {
                    break;
                }
            }
            self.expects("]")?;
        }
        Ok(whole)
    }

    fn part(&mut self, of: Expression) -> Result<Expression> {
        let axis = self.tokens.get(self.at).filter(|token| is_name(token));
        let axis = axis
            .context("an axis is expected after `[`: write `value[axis='label']`")?
            .to_string();
        self.at += 1;
        let but = self.takes("!=");
        if !but {
            self.expects("=")?;
        }
        let which = if self.takes("[") {
            let labels = self.labels()?;
            if but {
                Which::But(labels)
            } else {
                Which::Some(labels)
            }
        } else {
            match self.deeper(|parser| parser.operation(0))? {
                Expression::Text(label) if but => Which::But(vec![label]),
                which => Which::One(Box::new(which)),
            }
        };
        Ok(Expression::Part(Box::new(of), axis, which))
    }

    fn labels(&mut self) -> Result<Vec<String>> {
        let mut labels = Vec::new();
        while !self.takes("]") {
            labels.push(match self.tokens.get(self.at) {
                Some(token) if is_number(token) => number(token)?.to_string(),
                token => {
                    let label = token.and_then(|token| quoted(token));
                    label.context("labels in a list need quotes: `['one', 'two']`")?
                }
            });
            self.at += 1;
            self.takes(",");
        }
        Ok(labels)
    }

    fn atom(&mut self) -> Result<Expression> {
        let token = *self
            .tokens
            .get(self.at)
            .context("the expression ends too early")?;
        self.at += 1;
        if is_number(token) {
            return number(token).map(Expression::Number);
        }
        if let Some(text) = quoted(token) {
            return Ok(Expression::Text(text));
        }
        if token == "(" {
            let inner = self.deeper(|parser| parser.operation(0))?;
            self.expects(")")?;
            return Ok(inner);
        }
        ensure!(is_name(token), unexpected(token));
        if !self.takes("(") {
            return Ok(Expression::Name(token.to_owned()));
        }
        let mut given = Vec::new();
        while !self.takes(")") {
            given.push(self.deeper(|parser| parser.operation(0))?);
            if !self.takes(",") {
                self.expects(")")?;
                break;
            }
        }
        Ok(Expression::Call(token.to_owned(), given))
    }
}

/// A text with expressions in braces, such as `{gain} percent`, split into parts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Template {
    /// For each expression: the text before it, the expression, and the number of decimals if the template states it.
    pieces: Vec<(String, Expression, Option<usize>)>,
    rest: String,
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// An unmatched brace; an invalid expression between braces.
    pub(super) fn parse(text: &str) -> Result<Template> {
        let (mut pieces, mut rest) = (Vec::new(), text);
        while let Some(open) = rest.find('{') {
            let close = rest[open..].find('}').context("`{` has no `}`")? + open;
            let (inner, digits) = match rest[open + 1..close].rsplit_once(":.") {
                Some((inner, digits)) => {
                    let digits: Option<usize> = digits.parse().ok().filter(|digits| *digits <= DIGITS_MAX);
                    let said = || {
                        format!("`{{{inner}:.…}}` must end with the number of decimals, at most {DIGITS_MAX}")
                    };
                    (inner, Some(digits.with_context(said)?))
                }
                None => (&rest[open + 1..close], None),
            };
            pieces.push((rest[..open].to_owned(), Expression::parse(inner)?, digits));
            rest = &rest[close + 1..];
        }
        let rest = rest.to_owned();
        Ok(Template { pieces, rest })
    }

    /// Returns the text, in which a function has formatted each expression.
    ///
    /// # Errors
    /// Those of the function.
    pub(super) fn filled(
        &self,
        mut shown: impl FnMut(&Expression, Option<usize>) -> Result<String>,
    ) -> Result<String> {
        let mut text = String::new();
        for (before, expression, digits) in &self.pieces {
            text += before;
            text += &shown(expression, *digits)?;
        }
        Ok(text + &self.rest)
    }

    /// Returns the names that the template uses.
    pub(super) fn names(&self) -> Vec<&str> {
        self.pieces
            .iter()
            .flat_map(|(_, expression, _)| expression.names())
            .collect()
    }
}
